"""Features between capture and training: packed, in one reproducible order, from files or from the live target."""
