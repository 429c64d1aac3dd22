"""A ragged batch on the device, complete when it exists.

Tokens of all requests are flattened in order of the requests. Numbers that only steer loops stay
Python ints; what kernels index with is a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
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
    """One token of each request, or several consecutive ones: all but the first are drafts.

    Tokens lie wave after wave: first the first token of every request, then the second tokens of
    the requests that have one, in the same order, and so on; `waves` are the sizes, which never
    grow. So request i is the i-th of every wave that it is in.

    `token_ids`, `positions` [tokens]; `page_tables[kind]` [tokens, pages], equal rows for tokens
    of one request. Recurrent state is read at `read_slots` [tokens] and written at `write_slots`
    [tokens]: what a wave reads, the wave before may have written. Plain decoding is one wave whose
    two vectors are equal.
    """

    token_ids: Tensor
    positions: Tensor
    page_tables: Mapping[Kind, Tensor]
    read_slots: Tensor
    write_slots: Tensor
    waves: tuple[int, ...]

    def wave_by_wave(self, advance: Callable[[slice], Tensor]) -> Tensor:
        """What `advance` makes of the tokens of each wave, in order: [tokens, …].

        For recurrent layers. Attention needs no order: it writes all keys first, and a query sees
        no position behind its own.
        """
        if len(self.waves) == 1:
            return advance(slice(None))
        ends = list(accumulate(self.waves))
        return torch.cat([advance(slice(*span)) for span in pairwise([0, *ends])])
