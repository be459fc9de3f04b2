"""Features `live`: the target runs in this process, one micro-batch ahead of the trainer. Nothing touches the disk."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.core.types import Features, Sample
from draftsmith.features.source import Source
from draftsmith.target.capture import Capture


class LiveSource(Source):
    """Captures each sample when its batch is due, again in each epoch."""

    def __init__(self, capture: Capture, samples: Sequence[Sample]) -> None:
        self._capture, self._samples = capture, samples

    @property
    def lengths(self) -> Sequence[int]:
        return [len(s) for s in self._samples]

    def sample(self, index: int) -> Sample:
        return self._samples[index]

    def features(self, index: int) -> Features:
        return self._capture(self._samples[index])
