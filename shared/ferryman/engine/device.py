"""The device of a runner's tensors, and the transfers to it and back.

A host device has done everything when a call returns. A CUDA device queues its work on one stream;
an event fires when the result has arrived in pinned host memory. The two are two objects, chosen
when the runner is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ferryman.engine.memory.copy_stream import CopySide, CudaSide, HostSide, recorded_event
from ferryman.schedule.batch import Ints

Arrays = tuple[NDArray[Any], ...]


class FetchedStep(Protocol):
    """Values on their way back from the device."""

    def is_ready(self) -> bool: ...

    def arrays(self) -> Arrays:
        """The values; waits for them if need be."""
        ...

    def seconds(self) -> float:
        """The seconds that the device worked on the step."""
        ...


class TimedStep(Protocol):
    """A step under way since `ComputeDevice.begin`."""

    def fetch(self, tensors: Sequence[Tensor]) -> FetchedStep:
        """Ends the step and starts bringing `tensors` back."""
        ...


class ComputeDevice(Protocol):
    """A place for tensors with one queue of work."""

    @property
    def torch_device(self) -> torch.device: ...

    def entered(self) -> AbstractContextManager[object]:
        """The context that the forward stream's thread enters once, so that its work goes to this
        queue."""
        ...

    def upload(self, integers: Ints) -> Tensor:
        """One transfer of one buffer."""
        ...

    def begin(self) -> TimedStep: ...

    def copy_side(self) -> CopySide:
        """The side that copies while this queue works."""
        ...


class HostDevice:
    """The processor itself: uploads are views, results are there at once."""

    torch_device = torch.device("cpu")

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def upload(self, integers: Ints) -> Tensor:
        return torch.from_numpy(integers)

    def begin(self) -> TimedStep:
        return _HostTimed()

    def copy_side(self) -> CopySide:
        return HostSide()


class _HostTimed:
    def __init__(self) -> None:
        self._began = perf_counter()

    def fetch(self, tensors: Sequence[Tensor]) -> FetchedStep:
        arrays = tuple(tensor.numpy() for tensor in tensors)
        return _HostFetched(arrays, perf_counter() - self._began)


class _HostFetched:
    def __init__(self, arrays: Arrays, seconds: float) -> None:
        self._arrays = arrays
        self._seconds = seconds

    def is_ready(self) -> bool:
        return True

    def arrays(self) -> Arrays:
        return self._arrays

    def seconds(self) -> float:
        return self._seconds


class CudaDevice:
    """One CUDA stream of one card, fed by one thread."""

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    def entered(self) -> AbstractContextManager[object]:
        # Weights and slabs were queued on the default stream before.
        self._stream.wait_stream(torch.cuda.default_stream(self.torch_device))
        stream: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return stream

    def upload(self, integers: Ints) -> Tensor:
        pinned = torch.from_numpy(integers).pin_memory()
        return pinned.to(self.torch_device, non_blocking=True)

    def begin(self) -> TimedStep:
        return _CudaTimed()

    def copy_side(self) -> CopySide:
        return CudaSide(self.torch_device)


class _CudaTimed:
    def __init__(self) -> None:
        self._began = recorded_event()

    def fetch(self, tensors: Sequence[Tensor]) -> FetchedStep:
        hosts = [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
        for host, tensor in zip(hosts, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        return _CudaFetched(hosts, self._began, recorded_event())


class _CudaFetched:
    def __init__(
        self, hosts: Sequence[Tensor], began: torch.cuda.Event, ended: torch.cuda.Event
    ) -> None:
        self._hosts = hosts
        self._began = began
        self._ended = ended

    def is_ready(self) -> bool:
        return bool(self._ended.query())  # type: ignore[no-untyped-call]

    def arrays(self) -> Arrays:
        self._ended.synchronize()
        return tuple(np.asarray(host.numpy()) for host in self._hosts)

    def seconds(self) -> float:
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended)) / 1000.0
