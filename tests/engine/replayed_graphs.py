"""A stand-in for a card's graphs, on the processor, that forgives nothing which a card would not.

A capture notes every operation of torch and every launch of a kernel with the very tensors that it
took and gave. A replay runs those again and puts each result where it was put then: whatever Python
decided at the capture, and whatever it read on the host, is as it was. Reading a value on the host
fails, as does any operation whose result has a size that depends on values.

Before each replay the call is made once more, beside the state, and compared with the capture:
another operation, another number, another size, stride or address of what lies outside is an error.

Kernels run in Triton's interpreter: `like_a_card` makes launchers take tensors for a card's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ferryman_kernels._triton import Kernel

ON_HOST = ("tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__index__")
SIZED_BY_VALUES = {"nonzero", "masked_select", "bincount", "unique", "_unique2", "unique_dim"}
Launch = Callable[..., Any]


class ReadOnHost(RuntimeError):
    """A value, or a size that depends on values, was wanted on the host during a capture."""


class NotAsCaptured(AssertionError):
    """The call would launch something else than what was captured."""


@contextmanager
def like_a_card() -> Iterator[None]:
    """Kernels are launched for tensors of the processor too."""
    with patch.object(Tensor, "is_cuda", True, create=True):
        yield


@dataclass(frozen=True)
class NotedCall:
    """A launch, with the tensors that it took and gave."""

    name: str
    run: Launch
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: list[Tensor]

    def again(self) -> None:
        found = self.run(*self.args, **self.kwargs)
        for old, new in zip(self.given, _tensors(found), strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)


@dataclass
class Tape:
    """Calls in their order, and the tensors that came from outside."""

    calls: list[NotedCall] = field(default_factory=list)
    outside: dict[int, Tensor] = field(default_factory=dict)
    _made: dict[int, str] = field(default_factory=dict)
    _lines: list[str] = field(default_factory=list)

    def note(self, name: str, run: Launch, args: Any, kwargs: Any, found: Any) -> None:
        taken = [self._called(leaf) for leaf in pytree.tree_leaves((args, kwargs))]
        given = _tensors(found)
        self._lines.append(f"{name}({', '.join(taken)})")
        for index, tensor in enumerate(given):
            # An operation in place gives what it took.
            self._made.setdefault(id(tensor), f"%{len(self.calls)}.{index}")
        self.calls.append(NotedCall(name, run, args, dict(kwargs), given))

    def lines(self) -> list[str]:
        return self._lines

    def _called(self, leaf: Any) -> str:
        if not isinstance(leaf, Tensor):
            return repr(leaf) if not callable(leaf) else getattr(leaf, "__name__", "function")
        if id(leaf) in self._made:
            where = self._made[id(leaf)]
        else:
            where = f"@{leaf.data_ptr():x}"
            self.outside[id(leaf)] = leaf
        return f"{where}{tuple(leaf.shape)}{leaf.stride()}{leaf.dtype}"


class CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is called while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = Tape()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.name().removeprefix("aten::"), kwargs or {}
        if name.partition(".")[0] in SIZED_BY_VALUES or _is_index_by_mask(name, args):
            raise ReadOnHost(f"{name} has a result whose size depends on values")
        found = func(*args, **kwargs)
        self.tape.note(name, func, args, kwargs, found)
        return found

    def launch(self, kernel: Kernel, grid: tuple[int, ...]) -> Launch:
        def run(*args: Any, **kwargs: Any) -> None:
            with _disable_current_modes(), _readable():
                kernel.compiled[grid](*args, **kwargs)

        def noted(*args: Any, **kwargs: Any) -> None:
            run(*args, **kwargs)
            name = f"{kernel.function.__name__}{grid}"
            self.tape.note(name, run, args, kwargs, None)

        return noted


@contextmanager
def recording() -> Iterator[Tape]:
    recorder = CallRecorder()
    launches = patch.object(Kernel, "__getitem__", lambda self, grid: recorder.launch(self, grid))
    with ExitStack() as stack:
        stack.enter_context(launches)
        for name in ON_HOST:
            stack.enter_context(patch.object(Tensor, name, _refused(name), create=True))
        stack.enter_context(recorder)
        yield recorder.tape


@contextmanager
def _readable() -> Iterator[None]:
    """Within a kernel the interpreter reads as it likes."""
    with ExitStack() as stack:
        for name in ON_HOST:
            stack.enter_context(patch.object(Tensor, name, getattr(torch._C.TensorBase, name)))
        yield


def _refused(name: str) -> Callable[..., Any]:
    def refused(*_: Any) -> Any:
        raise ReadOnHost(f"Tensor.{name} waits for the device")

    return refused


def _is_index_by_mask(name: str, args: Any) -> bool:
    if not name.startswith("index"):
        return False
    return any(index.dtype == torch.bool for index in _tensors(args[1:2]))


def _tensors(found: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]


class ReplayedGraph:
    """A captured call."""

    def __init__(self, run: Callable[[], None], tape: Tape) -> None:
        self._run = run
        self._tape = tape
        self.num_replays = 0

    def replay(self) -> None:
        self._check()
        for call in self._tape.calls:
            call.again()
        self.num_replays += 1

    def _check(self) -> None:
        kept = {key: tensor.clone() for key, tensor in self._tape.outside.items()}
        with recording() as tape:
            self._run()
        for key, tensor in self._tape.outside.items():
            if tensor.numel():
                tensor.copy_(kept[key])
        pairs = zip(self._tape.lines(), tape.lines(), strict=False)
        for captured, now in pairs:
            if captured != now:
                raise NotAsCaptured(f"captured {captured}, and now {now}")
        if len(self._tape.calls) != len(tape.calls):
            raise NotAsCaptured(f"{len(self._tape.calls)} calls, and now {len(tape.calls)}")


class ReplayedGraphs:
    """Captures for `GraphedForward`."""

    def __init__(self) -> None:
        self.captured: list[ReplayedGraph] = []

    def capture(self, run: Callable[[], None]) -> ReplayedGraph:
        with recording() as tape:
            run()
        self.captured.append(ReplayedGraph(run, tape))
        return self.captured[-1]
