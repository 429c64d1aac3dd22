"""The progress of a model's load, in bytes of its files.

A model is read twice: every tensor for the fingerprint, in the order of the bytes on the disk, then
those that the loaders ask for, which are in memory by then. Each pass has a count of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from ferryman.model.weights.safetensors_header import StoredTensor


class LoadStage(StrEnum):
    """The passes over a model's files, in their order."""

    FINGERPRINT = "fingerprint"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """A stage in the loading of the model in the folder `model`."""

    model: str
    stage: LoadStage
    done_bytes: int
    total_bytes: int


ProgressListener = Callable[[LoadProgress], None]
"""Is called for every tensor, from any thread; it has to be quick."""


def unheard(progress: LoadProgress) -> None:
    """The listener of a caller who does not want to know."""


class ByteCount:
    """The bytes of a stage, each tensor once: of stacked experts one is read at a time."""

    def __init__(
        self,
        model: str,
        stage: LoadStage,
        tensors: Iterable[StoredTensor],
        listener: ProgressListener,
    ) -> None:
        self._model, self._stage, self._listener = model, stage, listener
        self._unread = {(tensor.file, tensor.start, tensor.end) for tensor in tensors}
        self._total = sum(end - start for _, start, end in self._unread)
        self._done = 0
        self._lock = threading.Lock()  # layers are loaded side by side

    def on_read(self, tensor: StoredTensor) -> None:
        """Counts a tensor that is about to be read; again, it counts for nothing."""
        place = tensor.file, tensor.start, tensor.end
        with self._lock:
            if place in self._unread:
                self._unread.remove(place)
                self._done += tensor.num_bytes
                self._tell()

    def finish(self) -> None:
        """Counts the tensors that no loader asked for."""
        with self._lock:
            self._unread.clear()
            self._done = self._total
            self._tell()

    def _tell(self) -> None:
        self._listener(LoadProgress(self._model, self._stage, self._done, self._total))
