"""Lossless speculative decoding, and what it accepts."""
