"""Checkpoints that serving engines load, read back and compared before success is reported."""
