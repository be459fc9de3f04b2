"""Settings of the evaluation."""

from __future__ import annotations

from typing import Literal

from draftsmith.core.config import Config, Positive, Size
from draftsmith.data.config import Sources
from draftsmith.drafts.base import Tree


class EvalConfig(Config):
    """How drafts are judged."""

    width: Positive = 5
    """Drafted tokens per pass for the acceptance figures of chains; speedups of all shorter chains are predicted too."""
    tree: Tree | None = None
    """Judge trees too: `{nodes: 16, top_k: 4, depth: 5}`; speedups of smaller trees are predicted too. Chains alone when absent."""
    temperature: Size = 0.0
    """0 decodes greedily; above, tokens are drawn, and outputs are distributed as the target's own."""
    seed: int = 0
    """Of the draws."""
    sets: Sources | None = None
    """Prompts: files, hub data sets, public sets by name, as in `data.train`, each a category of the report. When absent, the recipe's held-out conversations
    by their kind."""
    prompts: Positive | None = None
    """Use this many prompts of each set, evenly spread; all when absent."""
    max_new: Positive = 160
    """Longest answer in tokens."""
    batch: Positive = 64
    """Prompts decoded together for the acceptance figures: below about 50 rows a CPU multiplies at a fraction of its rate."""
    timed_prompts: Positive = 10
    """Prompts decoded alone, plain and speculative in turn, for the wall-clock figures."""
    timed_tokens: Positive = 80
    """Longest answer of those."""
    rounds: Positive = 7
    """Passes of each width timed for the predicted speedups, after one that is not counted; of a batch half as many."""
    batch_costs: bool = True
    """Predict speedups for `batch` prompts together too, beside those for one prompt."""
    examples: Positive = 6
    """Answers that the report shows token by token."""
    dtype: Literal["auto", "bfloat16", "float32"] = "float32"
    """Decoding dtype. In float32 speculative output equals plain output token for token."""
