"""A model whose products with weights have one order of sums on a card.

A loaded model multiplies by the library of the card (`PlainLinear`), whose order follows the number
of rows. Here each product becomes one of another type that has one order, and everything else of
the model stays the object that it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ferryman.model.layers.expert_products import GroupedProduct
from ferryman.model.layers.experts import GroupedExperts
from ferryman.model.layers.latent import BatchedHeads
from ferryman.model.weights.linear import PlainLinear
from ferryman.model.weights.quantisation.quantised_matrix import TiledLinear
from ferryman_kernels.products.dense_product import ask_tiles, dense_product
from ferryman_kernels.products.grouped_product import FloatStack, grouped_product_in_one_order

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OneOrderLinear:
    """Our kernel's product; `weight` [out_dim, in_dim], `bias` [out_dim] or None.

    A token's bits depend on the token and the weight alone.
    """

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return dense_product(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class OneOrderHeads:
    """A product for each head, which is an expert that every token goes to."""

    stack: FloatStack

    def __call__(self, rows: Tensor) -> Tensor:
        tokens, heads, in_dim = rows.shape
        pairs = torch.arange(tokens * heads, device=rows.device)
        by_head = pairs.view(tokens, heads).T.flatten()
        starts = torch.arange(heads + 1, device=rows.device) * tokens
        flat = rows.reshape(-1, in_dim)
        products = grouped_product_in_one_order(flat, self.stack, by_head, starts)
        return products.view(tokens, heads, -1)


def in_one_order(model: T) -> T:
    """The model, or a part of one, on a card: a tree of dataclasses. Parts that were shared are
    shared again."""
    rebuilt: T = _Rebuilding().of(model)
    return rebuilt


class _Rebuilding:
    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}

    def of(self, part: Any) -> Any:
        """`part` itself if nothing in it changes."""
        if id(part) not in self._known:
            # The old part is kept: another one could get its address.
            self._known[id(part)] = part, self._made(part)
        return self._known[id(part)][1]

    def _made(self, part: Any) -> Any:
        match part:
            case PlainLinear(weight, bias):
                ask_tiles(weight.device)
                return OneOrderLinear(weight.contiguous(), bias)
            case TiledLinear():
                return replace(part, product=dense_product)
            case BatchedHeads(weights):
                return OneOrderHeads(FloatStack(weights.transpose(1, 2).contiguous(), None))
            case GroupedExperts() | GroupedProduct():
                return replace(part, product=grouped_product_in_one_order)
            case Mapping():
                return self._items(part)
            case tuple() if not hasattr(part, "_fields"):
                inner = tuple(map(self.of, part))
                return inner if any(map(_differ, inner, part)) else part
            case _ if is_dataclass(part) and not isinstance(part, type):
                return self._dataclass(part)
        return part

    def _items(self, part: Mapping[Any, Any]) -> Mapping[Any, Any]:
        inner = {key: self.of(value) for key, value in part.items()}
        return inner if any(inner[key] is not value for key, value in part.items()) else part

    def _dataclass(self, part: Any) -> Any:
        old = {field.name: getattr(part, field.name) for field in fields(part) if field.init}
        new = {name: self.of(value) for name, value in old.items()}
        changed = {name: value for name, value in new.items() if value is not old[name]}
        return replace(part, **changed) if changed else part


def _differ(new: Any, old: Any) -> bool:
    return new is not old
