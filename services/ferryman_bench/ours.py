"""The model of this repository, driven without scheduler and servers: its forwards alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.engine.slabs import Slabs
from ferryman.model.batch import DecodeBatch, PrefillBatch
from ferryman.model.decoder import Model
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.state import ModelState, state_views

PAGE_SIZE = 64


@dataclass(frozen=True, slots=True)
class Ours:
    """A model with room for `max_requests` of `pages_each` pages; request i owns a run of them."""

    model: Model
    state: ModelState
    pages_each: int

    def prefill(self, prompt_len: int, chunk_tokens: int, requests: int = 1) -> None:
        """Computes random prompts from position 0, chunk after chunk."""
        for start in range(0, prompt_len, chunk_tokens):
            self._chunk(requests, start, min(start + chunk_tokens, prompt_len))

    def _chunk(self, requests: int, start: int, end: int) -> None:
        tokens = (end - start) * requests
        batch = PrefillBatch(
            token_ids=torch.randint(self.model.vocab_size, (tokens,)),
            positions=torch.arange(start, end).repeat(requests),
            rows=torch.arange(requests).repeat_interleave(end - start),
            spans=((start, end),) * requests,
            page_tables=self._page_tables(requests, end),
            working_slots=torch.arange(requests),
            snapshots=(),
            last_tokens=torch.arange(1, requests + 1) * (end - start) - 1,
        )
        self.model.prefill(batch, self.state)

    def decoder(self, requests: int, context_len: int) -> FerrymanDecoder:
        """A decoder after prompts of `context_len` tokens."""
        self.prefill(context_len, context_len, requests)
        return FerrymanDecoder(self, context_len, torch.zeros(requests, dtype=torch.int64))

    def decode(self, token_ids: Tensor, position: int) -> Tensor:
        """One greedy step of every request at `position`."""
        requests = len(token_ids)
        slots = torch.arange(requests)
        batch = DecodeBatch(
            token_ids=token_ids,
            positions=torch.full((requests,), position),
            page_tables=self._page_tables(requests, position + 1),
            read_slots=slots,
            write_slots=slots,
            waves=(requests,),
        )
        return self.model.decode(batch, self.state).argmax(-1)

    def _page_tables(self, requests: int, end: int) -> dict[Kind, Tensor]:
        first = torch.arange(requests)[:, None] * self.pages_each
        return {Kind.FULL: first + torch.arange(-(-end // PAGE_SIZE))}


class FerrymanDecoder:
    """Each call is one greedy step."""

    def __init__(self, ours: Ours, position: int, token_ids: Tensor) -> None:
        self._ours, self._position, self._token_ids = ours, position, token_ids

    def __call__(self) -> None:
        self._token_ids = self._ours.decode(self._token_ids, self._position)
        self._position += 1


def load_ours(folder: Path, dtype: str, max_requests: int, max_len: int) -> Ours:
    """A model with room for `max_requests` requests of `max_len` tokens."""
    model = load_model(folder, LoadOptions(dtype, page_size=PAGE_SIZE))
    pages_each = -(-max_len // PAGE_SIZE)
    slots = {Kind.FULL: max_requests * pages_each, Kind.RECURRENT: max_requests}
    slabs = Slabs.allocate(model.manifest, slots, "cpu")
    for slab in slabs.by_kind.values():
        slab.tensor.zero_()
    return Ours(model, state_views(model.manifest, slabs.tensors), pages_each)
