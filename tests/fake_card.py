"""A card that is not there: tensors without numbers, which refuse everything that would wait.

Inside `fake_card` tensors on "cuda" have shapes, dtypes and a device, and no bytes (torch's
FakeTensorMode). So code takes the ways of a card, tensors on two devices do not mix, and Triton
kernels are asked for and not launched. Inside `without_waits` an operation that makes a host wait
for its card raises HostSync: reading a number back, a shape that depends on numbers, a copy from
memory that is not pinned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ferryman.model.layers import decoder, ngrams, tabled_experts
from ferryman_kernels._triton import Kernel
from ferryman_kernels.products import _dense_product_triton, dense_product

CARD = torch.device("cuda", 0)
_ATEN = torch.ops.aten

_COPIES = ("aten._to_copy", "aten.copy_", "aten.copy")
_BY_NUMBERS = (
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten.masked_select",
    "aten._unique2",
    "aten.unique_dim",
    "aten.unique_consecutive",
    "aten.bincount",
    "aten.equal",
    "aten.is_nonzero",
)


class HostSync(Exception):
    """The host would wait for the card here."""


@contextmanager
def fake_card() -> Iterator[None]:
    """Inside the block there is one card. Triton kernels count as run."""
    # Torch's own methods ask for the card, which is not there, before they dispatch.
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        for owner, name, value in (
            (torch.cuda, "device_count", lambda: 1),
            (Kernel, "__getitem__", lambda kernel, grid: lambda *args, **constants: None),
            # A mode of torch holds in its own thread alone.
            (decoder, "side_by_side", lambda load, items: tuple(map(load, items))),
            # A table without numbers names no expert that is missing.
            (tabled_experts, "are_below", lambda numbers, end: True),
            (ngrams, "are_numbers", lambda stored, numbers: True),
            (dense_product, "tiles_agree", lambda device: True),
            (_dense_product_triton, "tiles_agree", lambda device: True),
            (Tensor, "__getitem__", _get_item),
            (Tensor, "__setitem__", _set_item),
            (Tensor, "copy_", _copy),
            (Tensor, "contiguous", _contiguous),
            (Tensor, "new_tensor", _new_tensor),
            (Tensor, "nonzero", lambda tensor: _ATEN.nonzero.default(tensor)),
            (Tensor, "pin_memory", _pinned),
            (Tensor, "data_ptr", lambda tensor: tensor.storage_offset() * tensor.itemsize),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


@contextmanager
def without_waits() -> Iterator[None]:
    """Inside the block an operation that would wait raises HostSync."""
    made = torch.tensor

    def tensor(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if device is not None and torch.device(device).type == "cuda":
            raise HostSync("torch.tensor copies from memory that is not pinned")
        return made(*args, **kwargs)

    def read(self: Tensor, *args: Any) -> Any:
        raise HostSync("numbers of a card are read")

    def on_host(plain: Any) -> Any:
        return lambda self, *args: (read if self.is_cuda else plain)(self, *args)

    with ExitStack() as stack:
        stack.enter_context(_Refusing())  # type: ignore[no-untyped-call]
        stack.enter_context(patch.object(torch, "tensor", tensor))
        for name in ("tolist", "numpy", "item"):
            stack.enter_context(patch.object(Tensor, name, on_host(getattr(Tensor, name))))
        yield


class _Refusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at every operation before it runs, on whatever thread it is called."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.name().partition(".")[0].replace("::", ".")
        tensors = [each for each in _flat([*args, *kwargs.values()]) if isinstance(each, Tensor)]
        if any(tensor.device.type == "cuda" for tensor in tensors):
            self._check(name, args, kwargs)
        elif torch.device(kwargs.get("device") or "cpu").type == "cuda" and tensors:
            self._check_upload(tensors[0], kwargs)
        return func(*args, **kwargs)

    def _check(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if name in _BY_NUMBERS:
            raise HostSync(name)
        if name == "aten.repeat_interleave" and kwargs.get("output_size") is None:
            raise HostSync(f"{name} without output_size")
        if name in ("aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_"):
            for index in args[1]:
                if index is not None and (index.dtype is torch.bool or not index.is_cuda):
                    raise HostSync(f"{name} by {index.dtype} on {index.device}")
        if name in _COPIES:
            self._check_copy(name, args, kwargs)

    def _check_copy(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        target = kwargs.get("device") or args[0].device
        source = args[0] if name == "aten._to_copy" else args[1]
        if not isinstance(source, Tensor):
            return
        if name != "aten._to_copy":
            target, kwargs = args[0].device, {"non_blocking": len(args) > 2 and args[2]}
        if source.is_cuda and torch.device(target).type == "cpu":
            raise HostSync(f"{name} from the card")
        if not source.is_cuda and torch.device(target).type == "cuda" and source.ndim:
            self._check_upload(source, kwargs)

    def _check_upload(self, source: Tensor, kwargs: Mapping[str, Any]) -> None:
        is_pinned = getattr(source, "is_pinned_here", False)
        if not (is_pinned and kwargs.get("non_blocking")):
            raise HostSync("a copy to the card from memory that is not pinned, or a blocking one")


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _pinned(tensor: Tensor) -> Tensor:
    found = tensor.clone()
    found.is_pinned_here = True  # type: ignore[attr-defined]
    return found


def _copy(tensor: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    found: Tensor = _ATEN.copy_.default(tensor, source, non_blocking)
    return found


def _contiguous(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous():
        return tensor
    found: Tensor = _ATEN.clone.default(tensor, memory_format=torch.contiguous_format)
    return found


def _new_tensor(tensor: Tensor, data: Any) -> Tensor:
    return torch.tensor(data, dtype=tensor.dtype, device=tensor.device)


def _get_item(tensor: Tensor, key: Any) -> Any:
    view, indices = _split_key(tensor, key)
    return view if indices is None else _ATEN.index.Tensor(view, indices)


def _set_item(tensor: Tensor, key: Any, value: Any) -> None:
    view, indices = _split_key(tensor, key)
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
    if indices is None:
        _copy(view, value)
    else:
        _ATEN.index_put_.default(view, indices, value.to(tensor.dtype))


def _split_key(tensor: Tensor, key: Any) -> tuple[Tensor, list[Tensor | None] | None]:
    """The view that the plain parts of a key choose, and its tensors by the view's dimensions."""
    parts = list(key) if isinstance(key, tuple) else [key]
    parts = [torch.tensor(part) if isinstance(part, list) else part for part in parts]
    named = sum(1 for part in parts if part is not None and part is not Ellipsis)
    view, indices = tensor, list[Tensor | None]()
    for part in parts:
        dim = len(indices)
        if part is Ellipsis:
            indices += [None] * (tensor.ndim - named)
        elif isinstance(part, int):
            view = _ATEN.select.int(view, dim, part)
        elif part is None:
            view = _ATEN.unsqueeze.default(view, dim)
            indices.append(None)
        elif isinstance(part, slice):
            view = _ATEN.slice.Tensor(view, dim, part.start, part.stop, part.step or 1)
            indices.append(None)
        else:
            indices.append(part)
    return view, None if all(part is None for part in indices) else indices
