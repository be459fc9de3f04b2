"""A recipe: all settings of a run. Each part's class stands beside the code that it configures."""

from __future__ import annotations

from draftsmith.core.config import Config
from draftsmith.data.config import DataConfig
from draftsmith.drafts import AnyDraftConfig
from draftsmith.eval.config import EvalConfig
from draftsmith.export.write import ExportConfig
from draftsmith.features.config import FeaturesConfig
from draftsmith.target.config import TargetConfig
from draftsmith.train.loop import TrainConfig


class Recipe(Config):
    """One YAML file a run; `run.yaml` in the run's folder is the resolved one."""

    run: str
    """Folder of the run: features, checkpoints, logs, report and export."""
    target: TargetConfig
    """Target model."""
    data: DataConfig = DataConfig()
    """Conversations."""
    draft: AnyDraftConfig = AnyDraftConfig()
    """The draft."""
    features: FeaturesConfig = FeaturesConfig()
    """Target features."""
    train: TrainConfig = TrainConfig()
    """Training."""
    eval: EvalConfig = EvalConfig()
    """Evaluation."""
    export: ExportConfig = ExportConfig()
    """Export."""
