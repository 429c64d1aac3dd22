"""The bytes that loaded weights hold, computed from headers before any weight is read.

The family's own loader runs on torch's meta device, where a tensor has a shape and no bytes. So
everything that a loader does to weights is counted as it is: another dtype, norms that stay in the
accumulation dtype, parts of a rank, experts taken apart, quantised weights kept or expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ferryman.model.config import family_of, load_config
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_mtp_head
from ferryman.model.shapes.manifest import state_manifest
from ferryman.model.weights.checkpoint import TORCH_DTYPES, Checkpoint
from ferryman.model.weights.linear import CARD_SHAPES, PlainLinear, packed_bytes
from ferryman.model.weights.named_weights import Weights
from ferryman.model.weights.safetensors_header import StoredTensor


@dataclass(frozen=True, slots=True)
class CheckpointShapes(Checkpoint):
    """A checkpoint that is read without its bytes, so its files need not be there."""

    def view(self, stored: StoredTensor) -> Tensor:
        dtype = TORCH_DTYPES.get(stored.dtype, torch.uint8)
        return torch.empty(stored.shape, dtype=dtype, device="meta").as_subclass(ShapeTensor)


class ShapeTensor(Tensor):
    """A tensor on the meta device. Sums, products, rows and the like are made here, as shapes.

    torch makes them in Python, after an import of its compiler: up to a second at each start.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if func in IN_PLACE:
            return args[0]
        made = SHAPED.get(func)
        # An index without a tensor makes a view, which must share its storage, so torch makes it.
        is_view = func is Tensor.__getitem__ and not torch.is_tensor(args[1])
        if made is None or is_view or named.keys() - NAMED:
            return super().__torch_function__(func, types, args, named)  # type: ignore[no-untyped-call]
        shape, dtype = made(*args, **named)
        return torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)


Made = tuple[Sequence[int], torch.dtype]
"""The shape and the dtype of a new tensor."""


def _like(first: Tensor) -> Made:
    return first.shape, first.dtype


def _combined(*args: Any) -> Made:
    # numpy's, for torch.broadcast_shapes makes that import itself.
    shape = np.broadcast_shapes(*(arg.shape for arg in args if torch.is_tensor(arg)))
    return shape, torch.result_type(args[0], args[-1])


def _compared(*args: Any) -> Made:
    return _combined(*args)[0], torch.bool


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Made:
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return shape, reduce(torch.promote_types, (part.dtype for part in parts))


def _picked(whole: Tensor, rows: Tensor) -> Made:
    return (*rows.shape, *whole.shape[1:]), whole.dtype


def _largest(whole: Tensor, dim: int, *, keepdim: bool) -> Made:
    assert keepdim, "no loader asks for another form"
    return [1 if axis == dim else size for axis, size in enumerate(whole.shape)], whole.dtype


def _repeated(row: Tensor, times: int) -> Made:
    return [len(row) * times], row.dtype


IN_PLACE = {Tensor.mul_, Tensor.round_}
NAMED = {"dim", "keepdim"}
"""The arguments that may come by name; a call with another one is left to torch."""
SHAPED: Mapping[Callable[..., Any], Callable[..., Made]] = {
    getattr(place, name): _combined
    for place in (Tensor, torch)
    for name in ("add", "sub", "mul", "div", "neg", "exp")
} | {
    Tensor.__rsub__: _combined,
    Tensor.__rtruediv__: _combined,
    Tensor.__getitem__: _picked,
    Tensor.__gt__: _compared,
    Tensor.abs: _like,
    Tensor.amax: _largest,
    Tensor.gt: _compared,
    Tensor.repeat: _repeated,
    functional.softplus: _like,
    torch.cat: _joined,
    torch.ones_like: _like,
    torch.where: lambda _, first, second: _combined(first, second),
    torch.zeros_like: _like,
}


def weight_bytes(folder: Path, tensors: Mapping[str, StoredTensor], options: LoadOptions) -> int:
    """The bytes of the weights on one rank, once the model in `folder` is loaded with `options`.

    Raises ConfigError as `load_model` does.
    """
    config, ranks = load_config(folder), options.group.num_ranks
    manifest = state_manifest(config, options.dtype, options.page_size, "not read", ranks)
    shapes = _shapes(folder, tensors, options)
    model = family_of(folder).load(config, manifest, shapes)
    if shapes.lora is not None:
        shapes.lora.served()  # raises for an adapter of another model
    return held_bytes(model, is_on_cpu=torch.device(options.device).type == "cpu")


def mtp_bytes(folder: Path, tensors: Mapping[str, StoredTensor], options: LoadOptions) -> int:
    """The `weight_bytes` of the layer for multi-token prediction alone."""
    head = load_mtp_head(folder, _shapes(folder, tensors, options), options.page_size)
    return held_bytes(head, is_on_cpu=torch.device(options.device).type == "cpu")


def _shapes(folder: Path, tensors: Mapping[str, StoredTensor], options: LoadOptions) -> Weights:
    """The weights of one rank as shapes on the meta device, in the format of the true one."""
    is_on_cpu = torch.device(options.device).type == "cpu"
    place = torch.device("meta") if is_on_cpu else CARD_SHAPES
    shapes = replace(options, device=place).weights(CheckpointShapes(folder, tensors, {}))
    return replace(shapes, format=options.format_of(folder))


def held_bytes(model: object, *, is_on_cpu: bool) -> int:
    """The bytes of all tensors in a model on the meta device, as they will be on another.

    A storage counts once, however many tensors look at it. A weight that a CPU's linear layer packs
    is a copy of its own, and counts once for all that share the layer, as a tied head and its
    embedding do.
    """
    storages: dict[int, int] = {}
    packed: dict[int, int] = {}
    for tensor, linear in _tensors_of(model):
        if linear is not None and is_on_cpu and packed_bytes(tensor):
            # Layers that share a linear layer share its copy.
            packed[id(linear)] = packed_bytes(tensor)
        else:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(packed.values()) + sum(storages.values())


def _tensors_of(part: object) -> Iterator[tuple[Tensor, PlainLinear | None]]:
    """Every tensor in a tree of dataclasses, and the linear layer that it is the weight of."""
    if isinstance(part, Tensor):
        yield part, None
    elif isinstance(part, PlainLinear):
        yield part.weight, part
        if part.bias is not None:
            yield part.bias, None
    elif isinstance(part, Mapping):
        for inner in part.values():
            yield from _tensors_of(inner)
    elif isinstance(part, tuple | list):
        for inner in part:
            yield from _tensors_of(inner)
    elif is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            yield from _tensors_of(getattr(part, field.name))
