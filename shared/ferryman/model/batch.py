"""A ragged batch on the device, complete when it exists.

Tokens of all requests are flattened in order of the requests. Numbers that only steer loops stay
Python ints; what kernels index with is a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ferryman.cache.manifest import Kind


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """One chunk of each request.

    `token_ids`, `positions`, `rows` [tokens], where rows is the index of each token's request;
    `spans` the absolute (start, end) of each chunk; `page_tables[kind]` [requests, pages];
    `working_slots` [requests]; `snapshots` of (request index, position, recurrent slot);
    `last_tokens` [sampled]: indices of the tokens whose logits are wanted.
    """

    token_ids: Tensor
    positions: Tensor
    rows: Tensor
    spans: tuple[tuple[int, int], ...]
    page_tables: Mapping[Kind, Tensor]
    working_slots: Tensor
    snapshots: tuple[tuple[int, int, int], ...]
    last_tokens: Tensor


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One token of each request: `token_ids`, `positions`, `working_slots` [requests]."""

    token_ids: Tensor
    positions: Tensor
    page_tables: Mapping[Kind, Tensor]
    working_slots: Tensor
