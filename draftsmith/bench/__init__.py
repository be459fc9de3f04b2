"""Measuring running servers: load, latencies, the engine's own acceptance counters, and what they say beside training and evaluation."""
