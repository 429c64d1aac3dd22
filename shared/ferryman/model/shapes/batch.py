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
from ferryman_kernels.ragged import PaddedSpan

Spans = tuple[tuple[int, int], ...] | PaddedSpan
Snapshots = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class AdapterSegment:
    """The tokens `rows` [rows] of a batch that use the LoRA adapter `adapter`, numbered from 1."""

    adapter: int
    rows: Tensor


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """One chunk of each request.

    `token_ids`, `positions`, `rows` [tokens]: a token's row is the index of its request. `spans`:
    the absolute (start, end) of each chunk; or one chunk with padding behind it, at position -1,
    whose snapshots are in the span's own tables. `page_tables[kind]` [requests, pages];
    `working_slots` [requests]; `snapshots` of (request index, position, recurrent slot).
    `last_tokens` [sampled]: indices of the tokens whose logits are computed. `adapters`: the
    segments of those tokens that use one.
    """

    token_ids: Tensor
    positions: Tensor
    rows: Tensor
    spans: Spans
    page_tables: Mapping[Kind, Tensor]
    working_slots: Tensor
    snapshots: Snapshots
    last_tokens: Tensor
    adapters: tuple[AdapterSegment, ...] = ()

    @property
    def scans(self) -> tuple[Spans, Tensor, Snapshots]:
        """The places of recurrent states, as kernels take them."""
        return self.spans, self.working_slots, self.snapshots


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One token of each request, or several consecutive ones: all but the first are drafts.

    Tokens are ordered by wave: first the first token of every request, then the second tokens of
    the requests that have one, in the same order, and so on. `waves` are the sizes, which never
    grow. So request i is the i-th of every wave that contains it.

    `token_ids`, `positions` [tokens]; `page_tables[kind]` [tokens, pages], equal rows for tokens of
    one request. Recurrent state is read at `read_slots` [tokens] and written at `write_slots`
    [tokens]; a wave may read a slot that the previous wave wrote. Plain decoding is one wave whose
    two vectors are equal. `rows` [tokens] are 0, 1, 2, …: each token has its own row of the page
    tables. `adapters` as in PrefillBatch.
    """

    token_ids: Tensor
    positions: Tensor
    page_tables: Mapping[Kind, Tensor]
    read_slots: Tensor
    write_slots: Tensor
    waves: tuple[int, ...]
    rows: Tensor
    adapters: tuple[AdapterSegment, ...] = ()

    def wave_by_wave(self, advance: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """The results of `advance` for the tokens of each wave, in order, joined: [tokens, …]. It
        gets their part of each of `inputs` [tokens, …], and the slots that they read and write.

        For recurrent layers. Attention needs no order: it writes all keys first, and a query sees
        no later position than its own.
        """
        parted = *inputs, self.read_slots, self.write_slots
        # A part of a tensor takes as long to make as a norm of one token.
        if len(self.waves) == 1:
            return advance(*parted)
        waves = [slice(*span) for span in pairwise([0, *accumulate(self.waves)])]
        return torch.cat([advance(*(part[wave] for part in parted)) for wave in waves])


StepBatch = PrefillBatch | DecodeBatch
"""A step of either kind. A layer treats both alike; a mixer does not."""
