"""Where features come from."""

from __future__ import annotations

from typing import Literal

from draftsmith.core.config import Config


class FeaturesConfig(Config):
    """How captured features reach the trainer."""

    kind: Literal["files", "live"] = "files"
    """files: captured once to disk, read in every epoch. live: the target runs in the training process, one batch ahead."""
    path: str | None = None
    """Folder of the feature files; `<run>/features` when absent."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype in which features are stored."""
    compute: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype in which the target runs: auto, bfloat16 or float32."""
