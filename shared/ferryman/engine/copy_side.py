"""Where copies beside the forward run, and how a forward waits for them.

On a host device copies are done when the copying call returns. A card copies on a second stream
from pinned memory; the forward stream waits for an event there, and the host waits for nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Protocol

import torch


class Fence(Protocol):
    """The end of a run of copies."""

    def wait(self) -> None:
        """What the calling thread has the device do from now on comes behind the copies."""
        ...

    def finish(self) -> None:
        """Returns when the copies have ended."""
        ...

    def seconds(self) -> float:
        """How long the copies took; waits for their end if need be."""
        ...


class Run(Protocol):
    """Copies under way since `CopySide.begin`."""

    def end(self) -> Fence: ...


class CopySide(Protocol):
    """Where copies run, and how a forward stream waits for them."""

    def entered(self) -> AbstractContextManager[object]:
        """What the copy stream's thread enters for each job."""
        ...

    def begin(self) -> Run: ...


class HostSide:
    """Copies are done when the call returns."""

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def begin(self) -> Run:
        return _HostRun()


class _HostRun:
    def __init__(self) -> None:
        self._began = perf_counter()

    def end(self) -> Fence:
        return _Passed(perf_counter() - self._began)


class _Passed:
    """A fence that nobody need wait for."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def wait(self) -> None:
        """All of it has happened."""

    def finish(self) -> None:
        """All of it has happened."""

    def seconds(self) -> float:
        return self._seconds


PASSED: Fence = _Passed(0.0)


class CudaSide:
    """A second stream of one card."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The slabs were filled on the default stream.
        self._stream.wait_stream(torch.cuda.default_stream(device))

    def entered(self) -> AbstractContextManager[object]:
        stream: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return stream

    def begin(self) -> Run:
        return _CudaRun()


class _CudaRun:
    def __init__(self) -> None:
        self._began = recorded_event()

    def end(self) -> Fence:
        return _CudaFence(self._began, recorded_event())


class _CudaFence:
    def __init__(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self._began, self._ended = began, ended

    def wait(self) -> None:
        self._ended.wait()

    def finish(self) -> None:
        self._ended.synchronize()

    def seconds(self) -> float:
        self.finish()
        return float(self._began.elapsed_time(self._ended)) / 1000.0


def recorded_event() -> torch.cuda.Event:
    """Of the calling thread's current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
