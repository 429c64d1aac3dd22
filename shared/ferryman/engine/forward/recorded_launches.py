"""The launches of a call on the processor, recorded while it runs, to be run again without Python.

At one request the Python between two loops takes longer than most of them compute. A recording is
the list of a call's loops and of torch's operations, each with the very tensors and addresses that
it took and gave:

    call ──record──► result,  recording ──replay──► the same result, from the data at the same
                              addresses then

Views, empty tensors and rows of numbers launch nothing. A result of torch is written where it was
put at first, by the operation's own `out` form if it has one. A value that Python read of a tensor
would be frozen in a recording, so a call that asks for a value, or for a size that depends on
values, is refused. That is learnt in the middle of the call, which runs to its end all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ferryman.model.shapes.state import LayerCount
from ferryman_kernels.cpu.launches import RecordedLaunch, launches_told_to
from ferryman_kernels.cpu.native_launches import LaunchPiece, launch_pieces

KNOWN_NAMESPACES = frozenset({"aten", "mkldnn"})
UNREPEATABLE = {
    torch.Tag.data_dependent_output: "it reads a value",
    torch.Tag.dynamic_output_shape: "its result's size depends on values",
    torch.Tag.nondeterministic_seeded: "it draws random numbers",
}
ASKING = frozenset({"aten::is_nonzero", "aten::allclose"})
"""Operations that read values, and which torch does not mark."""
CONSTANT = frozenset({"aten::arange", "aten::arange.start", "aten::arange.start_step"})
"""Operations whose results are constants: no loop writes into one, nor may an operation."""
COPYING = frozenset({"aten::to.dtype", "aten::_to_copy", "aten::contiguous", "aten::clone"})
"""Operations whose results are their first argument, in another dtype or order of memory."""
NOWHERE = 0
"""The address of an empty tensor."""
INDEXING = frozenset({"aten::index.Tensor", "aten::index_put_"})
"""Their results' sizes depend on values only if an index is a mask."""


@dataclass(frozen=True, slots=True)
class LaunchRecording:
    """Launches in their order, the `pieces` that repeat them, and all tensors that they read or
    write except state and weights, whole or in views.

    The tensors stay alive, each for itself: a tensor that the call made and kept elsewhere, such
    as a table, is never given to another recording.
    """

    launches: tuple[RecordedLaunch, ...]
    tensors: tuple[Tensor, ...]
    pieces: tuple[LaunchPiece, ...]

    @property
    def num_bytes(self) -> int:
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in self.tensors}
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())

    def replay(self, progress: LayerCount) -> None:
        """Runs all launches again; `progress` moves with each piece."""
        for piece in self.pieces:
            piece.run(*piece.args)
            progress.num_done += piece.num_launches


@dataclass(slots=True)
class LaunchRecorder:
    """The launches of one call so far; `refusal` is why it cannot be repeated, or empty."""

    launches: list[RecordedLaunch] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    refusal: str = ""

    def refuse(self, name: str, reason: str) -> None:
        self.refusal = self.refusal or f"{name}: {reason}"

    def recording(self) -> LaunchRecording:
        assert not self.refusal, self.refusal
        launches = tuple(self.launches)
        return LaunchRecording(launches, tuple(self.tensors), tuple(launch_pieces(launches)))


@contextmanager
def recorded_launches() -> Iterator[LaunchRecorder]:
    """Records what this thread launches until the end of the `with`."""
    recorder = LaunchRecorder()
    with (
        launches_told_to(recorder.launches.append),
        _ValueReads(recorder),
        _Operations(recorder),
    ):
        yield recorder


class _Operations(TorchDispatchMode):
    """Notes torch's operations."""

    def __init__(self, recorder: LaunchRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._constants: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to let torch's compiler skip this means to import it, a second of processor time."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, recorder = kwargs or {}, self._recorder
        if reason := _why_unrepeatable(func, args):
            recorder.refuse(func.name(), reason)
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        if any(tensor.is_mkldnn for tensor in outputs):
            recorder.refuse(func.name(), "its result has no memory of its own")
        are_views = _are_views(outputs, _tensors((args, kwargs)))
        if not are_views:
            recorder.tensors += outputs
        if func.name() in CONSTANT:
            self._constants |= _memory_of(outputs) - {NOWHERE}
        elif func._schema.is_mutable:
            if self._constants & _memory_of(_written(func, args, kwargs)):
                recorder.refuse(func.name(), "it writes into a constant")
            recorder.launches.append(RecordedLaunch(_called, (func, args, kwargs)))
        elif not (are_views or _is_empty(func.name())):
            recorder.launches.append(_written_again(func, args, kwargs, outputs))
        return result


class _ValueReads(TorchFunctionMode):
    """Notices `tolist`, which torch's operations do not show."""

    def __init__(self, recorder: LaunchRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist:
            self._recorder.refuse("tolist", "it reads values")
        return func(*args, **(kwargs or {}))


def _why_unrepeatable(func: Any, args: Sequence[Any]) -> str:
    if func.namespace not in KNOWN_NAMESPACES:
        return "it is none of torch's own operations"
    if func.name() in ASKING:
        return UNREPEATABLE[torch.Tag.data_dependent_output]
    if func.name() in INDEXING:
        masks = [
            tensor for tensor in _tensors(args[1:2]) if tensor.dtype in (torch.bool, torch.uint8)
        ]
        return UNREPEATABLE[torch.Tag.dynamic_output_shape] if masks else ""
    return next((reason for tag, reason in UNREPEATABLE.items() if tag in func.tags), "")


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes into."""
    values = {
        argument.name: kwargs.get(argument.name) for argument in func._schema.arguments[len(args) :]
    }
    values |= {
        argument.name: arg for argument, arg in zip(func._schema.arguments, args, strict=False)
    }
    return _tensors(
        [values[argument.name] for argument in func._schema.arguments if argument.is_write]
    )


def _is_empty(name: str) -> bool:
    """Whether an operation gives memory alone, with nothing in it."""
    return name.startswith(("aten::empty", "aten::new_empty"))


def _are_views(results: Sequence[Tensor], taken: Sequence[Tensor]) -> bool:
    """Whether all results lie in the memory of the arguments."""
    return _memory_of(results) <= _memory_of(taken)


def _memory_of(tensors: Sequence[Tensor]) -> set[int]:
    # A packed weight of oneDNN has no storage, and nothing is a view of it.
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if not tensor.is_mkldnn}


def _called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    func(*args, **kwargs)


def _written_again(func: Any, args: Any, kwargs: Any, results: list[Tensor]) -> RecordedLaunch:
    """The operation with its results written into `results`."""
    if func.name() in COPYING and args:
        return RecordedLaunch(results[0].copy_, args[:1])
    form = _out_form(func)
    if form is None:
        return RecordedLaunch(_copied, (func, args, kwargs, results))
    overload, names = form
    return RecordedLaunch(
        _called, (overload, args, {**kwargs, **dict(zip(names, results, strict=True))})
    )


def _copied(func: Any, args: Any, kwargs: Any, results: list[Tensor]) -> None:
    for old, new in zip(results, _tensors(func(*args, **kwargs)), strict=True):
        old.copy_(new)


@cache
def _out_form(func: Any) -> tuple[Any, tuple[str, ...]] | None:
    """The operation that takes the same arguments and writes into given tensors, and what it calls
    these; None if there is none."""
    taken = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    packet = func.overloadpacket
    for name in packet.overloads():
        overload = getattr(packet, name)
        arguments = overload._schema.arguments
        outs = tuple(argument.name for argument in arguments if argument.is_out)
        plain = [
            (argument.name, str(argument.type)) for argument in arguments if not argument.is_out
        ]
        if plain == taken and len(outs) == len(func._schema.returns) > 0:
            return overload, outs
    return None


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
