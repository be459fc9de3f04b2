"""`Source`: an endless, resumable stream of packed micro-batches, prepared one ahead of the trainer."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence

from draftsmith.core.types import FeatureBatch, Features, Sample
from draftsmith.features.pack import fill, pack, plan


class Source(ABC):
    """Features by index; the order and the packing are the same for every kind of source."""

    @property
    @abstractmethod
    def lengths(self) -> Sequence[int]:
        """Tokens of every sample."""

    @abstractmethod
    def sample(self, index: int) -> Sample:
        """Token ids and mask alone."""

    @abstractmethod
    def features(self, index: int) -> Features:
        """Everything captured for one sample."""

    def __len__(self) -> int:
        return len(self.lengths)

    def epoch(self, batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
        """Sample indices of every micro-batch of one epoch."""
        return plan(self.lengths, batch_tokens, seed, epoch)

    def stream(self, batch_tokens: int, seed: int, start: int = 0) -> Generator[FeatureBatch, None, None]:
        """Micro-batches from number `start` on, epoch after epoch, without end."""
        return _one_ahead(self.batch(indices) for indices in self._endless(batch_tokens, seed, start))

    def in_order(self, batch_tokens: int) -> Generator[FeatureBatch, None, None]:
        """Every sample once, in the order of the data."""
        return _one_ahead(self.batch(i) for i in fill(self.lengths, batch_tokens, range(len(self))))

    def batch(self, indices: Sequence[int]) -> FeatureBatch:
        """These samples, packed."""
        return pack([self.features(i) for i in indices])

    def _endless(self, batch_tokens: int, seed: int, start: int) -> Iterator[list[int]]:
        epoch = 0
        while True:
            batches = self.epoch(batch_tokens, seed, epoch)
            yield from batches[start:]
            start = max(0, start - len(batches))
            epoch += 1


def _one_ahead(batches: Iterator[FeatureBatch]) -> Generator[FeatureBatch, None, None]:
    """Make the next batch in a thread while the caller works on this one; errors surface in the caller."""
    ready: queue.Queue[FeatureBatch | BaseException | None] = queue.Queue(maxsize=1)
    stopped = threading.Event()

    def put(item: FeatureBatch | BaseException | None) -> bool:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for batch in batches:
                if not put(batch):
                    return
            put(None)
        except BaseException as error:  # handed to the caller, who raises it
            put(error)

    thread = threading.Thread(target=work, name="draftsmith-source", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        thread.join()
