"""A ragged batch on the device, complete when it exists.

Tokens of all requests are flattened in the order of the requests. Numbers that only steer loops are
Python ints; kernels index with tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ferryman.cache.manifest import Kind


@dataclass(frozen=True, slots=True)
class AdapterSegment:
    """The tokens `rows` [rows] of a batch that use the LoRA adapter `adapter`, numbered from 1."""

    adapter: int
    rows: Tensor


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """One chunk of each request.

    `token_ids`, `positions`, `rows` [tokens]: a token's row is the index of its request. `spans`:
    the absolute (start, end) of each chunk. `page_tables[kind]` [requests, pages]; `working_slots`
    [requests]; `snapshots` of (request index, position, recurrent slot). `last_tokens` [sampled]:
    indices of the tokens whose logits are computed. `adapters`: the segments of those tokens that
    use one.
    """

    token_ids: Tensor
    positions: Tensor
    rows: Tensor
    spans: tuple[tuple[int, int], ...]
    page_tables: Mapping[Kind, Tensor]
    working_slots: Tensor
    snapshots: tuple[tuple[int, int, int], ...]
    last_tokens: Tensor
    adapters: tuple[AdapterSegment, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One token of each request, or several consecutive ones: all but the first are drafts.

    Tokens are ordered by wave: first the first token of every request, then the second tokens of
    the requests that have one, in the same order, and so on. `waves` are the sizes, which never
    grow. So request i is the i-th of every wave that contains it.

    `token_ids`, `positions` [tokens]; `page_tables[kind]` [tokens, pages], equal rows for tokens of
    one request. Recurrent state is read at `read_slots` [tokens] and written at `write_slots`
    [tokens]; a wave may read a slot that the previous wave wrote. Plain decoding is one wave whose
    two vectors are equal. `adapters` as in PrefillBatch.
    """

    token_ids: Tensor
    positions: Tensor
    page_tables: Mapping[Kind, Tensor]
    read_slots: Tensor
    write_slots: Tensor
    waves: tuple[int, ...]
    adapters: tuple[AdapterSegment, ...] = ()

    def wave_by_wave(self, advance: Callable[[slice], Tensor]) -> Tensor:
        """The results of `advance` for the tokens of each wave, in order, joined: [tokens, …].

        For recurrent layers. Attention needs no order: it writes all keys first, and a query sees
        no later position than its own.
        """
        if len(self.waves) == 1:
            return advance(slice(None))
        ends = list(accumulate(self.waves))
        return torch.cat([advance(slice(*span)) for span in pairwise([0, *ends])])


StepBatch = PrefillBatch | DecodeBatch
"""A step of either kind. A layer treats both alike; a mixer does not."""
