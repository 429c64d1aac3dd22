"""The model of this repository, driven without scheduler and servers: its forwards alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.engine.decode_forward import EagerForward
from ferryman.engine.packed_step import pack
from ferryman.engine.replayed_forward import ReplayedForward
from ferryman.engine.slabs import Slabs
from ferryman.engine.step import AS_PLANNED
from ferryman.engine.step_tensors import DecodeTensors, unpack
from ferryman.model.layers.decoder import Model
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.shapes.batch import PrefillBatch
from ferryman.model.shapes.ranks import SINGLE_RANK
from ferryman.model.shapes.state import ModelState, state_views
from ferryman.schedule.batch import DecodeStep, SlotOps
from ferryman_bench.contender import ContenderModel
from ferryman_bench.timer import Job

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
        found = torch.empty(0)
        for start in range(0, len(token_ids), CHUNK_TOKENS):
            found = self._chunk(token_ids[start : start + CHUNK_TOKENS], start)
        return found

    def _chunk(self, token_ids: Tensor, start: int) -> Tensor:
        count = len(token_ids)
        batch = PrefillBatch(
            token_ids=token_ids,
            positions=torch.arange(start, start + count),
            rows=torch.zeros(count, dtype=torch.int64),
            spans=((start, start + count),),
            page_tables=self._page_tables(1, start + count),
            working_slots=torch.zeros(1, dtype=torch.int64),
            snapshots=(),
            last_tokens=torch.tensor([count - 1]),
        )
        return self.model.prefill(batch, self.state)

    def copy_to_all(self, requests: int) -> None:
        """Gives all requests the state of request 0."""
        for kind, slab in self.slabs.by_kind.items():
            each = 1 if kind is Kind.RECURRENT else self.pages_each
            for request in range(1, requests):
                slab.tensor[request * each : (request + 1) * each] = slab.tensor[:each]

    def decode_step(self, requests: int, position: int) -> DecodeTensors:
        """A step of every request at `position`, on its way as a worker's steps are."""
        rows = np.arange(requests)
        tables = self._page_tables(requests, position + 1)
        step = DecodeStep(
            step_id=0,
            ops=SlotOps(),
            request_ids=(),
            rows=rows,
            positions=np.full(requests, position),
            read_slots=rows,
            write_slots=rows,
            verify_depths=(requests,),
            page_tables={kind: table.numpy() for kind, table in tables.items()},
            draws=(),
        )
        packed = pack(step)
        tensors = unpack(packed, torch.from_numpy(packed.buffer))
        assert isinstance(tensors, DecodeTensors), "of a decode step"
        return tensors

    def _page_tables(self, requests: int, end: int) -> dict[Kind, Tensor]:
        first = torch.arange(requests)[:, None] * self.pages_each
        pages = first + torch.arange(-(-end // PAGE_SIZE))
        return {kind: pages for kind in self.slabs.by_kind if kind is not Kind.RECURRENT}


class FerrymanContender:
    """The contender that all others are compared with."""

    def __init__(self, model: ContenderModel) -> None:
        self._model = load_bench_model(model.folder, model.dtype)

    def logits(self, token_ids: Sequence[int]) -> list[float]:
        room = make_room(self._model, 1, len(token_ids))
        found: list[float] = room.prefill(torch.tensor(token_ids)).flatten().tolist()
        return found

    def prefill(self, prompt_len: int) -> Job:
        room = make_room(self._model, 1, prompt_len)
        return lambda: room.prefill(torch.randint(self._model.vocab_size, (prompt_len,)))

    def decoder(self, requests: int, context_len: int, steps: int) -> Job:
        room = make_room(self._model, requests, context_len + steps)
        room.prefill(torch.arange(context_len) % self._model.vocab_size)
        room.copy_to_all(requests)
        first = torch.zeros(requests, dtype=torch.int64)
        return FerrymanDecoder(room, context_len, first, steps)


class FerrymanDecoder:
    """Each call is one greedy step, by the forward of a worker."""

    def __init__(self, room: ModelWithRoom, position: int, token_ids: Tensor, steps: int) -> None:
        """`position` is that of `token_ids` [requests]; there are at most `steps` steps."""
        self._room, self._position, self._requests = room, position, len(token_ids)
        self._history = torch.zeros(len(token_ids), position + steps + 1, dtype=torch.int32)
        self._history[:, position] = token_ids
        model, state = room.model, room.state
        eager = EagerForward(model, AS_PLANNED, state, self._history, SINGLE_RANK)
        self._forward = ReplayedForward(eager)

    @torch.inference_mode()
    def __call__(self) -> None:
        step = self._room.decode_step(self._requests, self._position)
        self._position += 1
        self._history[:, self._position] = self._forward.run(step).logits.argmax(-1)


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
