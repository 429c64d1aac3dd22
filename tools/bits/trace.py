"""The trace of a sequence through a model: calls of parts and kernels, as each position sees them.

A part is an object of the decoder that is called: a layer, a mixer, a product, a norm. A kernel is
a function of `ferryman_kernels`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

from torch import Tensor

ROLES: Mapping[str, str] = {
    "paged_attention_prefill": "attention",
    "paged_attention_decode": "attention",
    "latent_attention": "attention",
    "choose_prefill": "sparse index",
    "choose_decode": "sparse index",
    "chunk_scan": "scan",
    "mamba_step": "scan",
    "mlstm_decode": "scan",
    "mlstm_scan": "scan",
    "rg_lru_decode": "scan",
    "rg_lru_scan": "scan",
    "selective_scan": "scan",
    "selective_scan_decode": "scan",
    "selective_state_update": "scan",
    "delta_chunk_scan": "scan",
    "delta_step": "scan",
    "channel_delta_scan": "scan",
    "channel_delta_decode": "scan",
    "wkv_decode": "scan",
    "wkv_scan": "scan",
    "causal_conv_prefill": "convolution",
    "causal_conv_decode": "convolution",
    "rms_norm": "norm",
    "add_rms_norm": "norm",
    "gated_rms_norm": "norm",
    "rms_norm_then_gate": "norm",
    "apply_rotary": "rotation",
    "packed_product": "product",
    "packed_grouped_product": "product of experts",
}
"""The work of kernels of which prefill and decode have different ones. Others have their name."""

WHOLE = "output"
"""The role of a part itself, beside those of the kernels within it."""


class EventKey(NamedTuple):
    """The same in two ways to a position: the part, the work in it, and which time in the step."""

    place: str
    role: str
    time: int


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One call, as one position sees it: the digests of its floating inputs by argument, and its
    output rows. `within` are the functions and parts that it called."""

    key: EventKey
    function: str
    within: frozenset[str]
    inputs: Mapping[str, bytes]
    outputs: tuple[Tensor, ...]


Trace = dict[int, list[TraceEvent]]
"""The events of each position, in the order in which calls returned."""


def parts_of(model: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a model that are called, with their places: `layers.0.mixer.qkv`."""
    pending: list[tuple[str, Any]] = [("", model)]
    while pending:
        place, value = pending.pop()
        if isinstance(value, tuple | list):
            pending += [(f"{place}.{index}", item) for index, item in enumerate(value)]
        elif is_dataclass(value) and type(value).__module__.startswith("ferryman.model."):
            if place and called_name(type(value)):
                yield place, value
            pending += [
                (f"{place}.{field.name}".strip("."), getattr(value, field.name))
                for field in fields(value)
            ]


def called_name(kind: type) -> str:
    """The method by which a part is called; empty if it is none."""
    own = {name for base in kind.__mro__ for name in vars(base)}
    return next((name for name in ("left_open", "forward", "__call__") if name in own), "")
