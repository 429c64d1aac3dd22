"""The model of this repository with room for requests, without scheduler and servers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.engine.memory.slabs import Slabs
from ferryman.model.layers.decoder import Model
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.shapes.batch import PrefillBatch
from ferryman.model.shapes.state import ModelState, state_views

PAGE_SIZE = 64
CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class ModelWithRoom:
    """A model with room for requests of `pages_each` pages; request i owns a run of them."""

    model: Model
    slabs: Slabs
    state: ModelState
    pages_each: int

    def prefill(self, token_ids: Tensor) -> Tensor:
        """Computes a prompt of request 0 from position 0, chunk after chunk; its logits."""
        logits = torch.empty(0)
        for start in range(0, len(token_ids), CHUNK_TOKENS):
            logits = self._chunk(token_ids[start : start + CHUNK_TOKENS], start)
        return logits

    def _chunk(self, token_ids: Tensor, start: int) -> Tensor:
        count = len(token_ids)
        batch = PrefillBatch(
            token_ids=token_ids,
            positions=torch.arange(start, start + count),
            rows=torch.zeros(count, dtype=torch.int64),
            spans=((start, start + count),),
            page_tables=self.page_tables(1, start + count),
            working_slots=torch.zeros(1, dtype=torch.int64),
            snapshots=(),
            last_tokens=torch.tensor([count - 1]),
        )
        return self.model.prefill(batch, self.state).logits(batch.last_tokens)

    def page_tables(self, requests: int, end: int) -> dict[Kind, Tensor]:
        """The pages [requests, pages] of each kind that hold positions before `end`."""
        first = torch.arange(requests)[:, None] * self.pages_each
        pages = first + torch.arange(-(-end // PAGE_SIZE))
        return {kind: pages for kind in self.slabs.by_kind if kind is not Kind.RECURRENT}


def load_bench_model(folder: Path, dtype: str) -> Model:
    """The model in float32 or bfloat16, or in bfloat16 with int8 weights for "int8"."""
    is_int8 = dtype == "int8"
    quantize = "int8" if is_int8 else "none"
    chosen = "bfloat16" if is_int8 else dtype
    return load_model(folder, LoadOptions(chosen, page_size=PAGE_SIZE, quantize=quantize))


def make_room(model: Model, max_requests: int, max_len: int) -> ModelWithRoom:
    """Room for `max_requests` requests of `max_len` tokens, all zero."""
    pages_each = -(-max_len // PAGE_SIZE)
    slots = {
        kind: max_requests * (1 if kind is Kind.RECURRENT else pages_each)
        for kind in model.manifest.kinds
    }
    slabs = Slabs.allocate(model.manifest, slots, "cpu")
    for slab in slabs.by_kind.values():
        slab.tensor.zero_()
    return ModelWithRoom(model, slabs, state_views(model.manifest, slabs.tensors), pages_each)
