"""Draftsmith trains, checks and ships draft models for speculative decoding."""

from draftsmith.drafts import DRAFTS
from draftsmith.target.weights import Target

__version__ = "0.1.0"
__all__ = ["DRAFTS", "Target", "__version__"]
