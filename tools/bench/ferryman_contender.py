"""The model of this repository as a contender: its forwards alone, as a worker runs them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.engine.forward.decode_forward import EagerForward
from ferryman.engine.forward.replayed_forward import ReplayedForward
from ferryman.engine.forward.step_tensors import DecodeTensors, pack, unpack
from ferryman.model.shapes.ranks import SINGLE_RANK
from ferryman.schedule.batch import DecodeStep, SlotOps
from ferryman_bench.engine_process import BenchModel
from ferryman_bench.model_room import ModelWithRoom, load_bench_model, make_room
from ferryman_bench.timer import Job


class FerrymanContender:
    """The contender that all others are compared with."""

    def __init__(self, model: BenchModel) -> None:
        self._model = load_bench_model(model.folder, model.dtype)

    def logits(self, token_ids: Sequence[int]) -> list[float]:
        room = make_room(self._model, 1, len(token_ids))
        logits: list[float] = room.prefill(torch.tensor(token_ids)).flatten().tolist()
        return logits

    def prefill(self, prompt_len: int) -> Job:
        room = make_room(self._model, 1, prompt_len)
        return lambda: room.prefill(torch.randint(self._model.vocab_size, (prompt_len,)))

    def decoder(self, requests: int, context_len: int, steps: int) -> Job:
        room = make_room(self._model, requests, context_len + steps)
        room.prefill(torch.arange(context_len) % self._model.vocab_size)
        copy_to_all(room, requests)
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
        eager = EagerForward(model, None, state, self._history, SINGLE_RANK)
        self._forward = ReplayedForward(eager, model.manifest.page_size)

    @torch.inference_mode()
    def __call__(self) -> None:
        step = decode_step(self._room, self._requests, self._position)
        self._position += 1
        self._history[:, self._position] = self._forward.run(step).logits.argmax(-1)


def copy_to_all(room: ModelWithRoom, requests: int) -> None:
    """Gives all requests the state of request 0."""
    for kind, slab in room.slabs.by_kind.items():
        slots = 1 if kind is Kind.RECURRENT else room.pages_each
        for request in range(1, requests):
            slab.tensor[request * slots : (request + 1) * slots] = slab.tensor[:slots]


def decode_step(room: ModelWithRoom, requests: int, position: int) -> DecodeTensors:
    """A step of every request at `position`, on its way as a worker's steps are."""
    rows = np.arange(requests)
    tables = room.page_tables(requests, position + 1)
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
