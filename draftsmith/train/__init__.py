"""Training a draft from a stream of features: loop, optimizer, checkpoints, logs."""
