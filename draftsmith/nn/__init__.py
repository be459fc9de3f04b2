"""Building blocks that drafts share: rotary positions, attention over chains, the Llama-like block, fused losses."""
