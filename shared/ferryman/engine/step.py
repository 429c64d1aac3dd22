"""What each rank of a worker does in a step: all of it follows from the packed step alone.

prologue   copies, clears, seeds, saves
forward    reads the history for decode, writes it for prefill; drafts stand behind what was read
drawing    tokens are drawn by rank 0, told to all, and written behind what was read
epilogue   snapshots
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.engine.packing import (
    StepTensors,
    decode_batch,
    filters_of,
    penalties_of,
    prefill_batch,
)
from ferryman.engine.slabs import Slabs
from ferryman.model.batch import DecodeBatch, PrefillBatch
from ferryman.model.ranks import Group
from ferryman.model.sampler import Past, greedy, log_probabilities, penalise, sample
from ferryman.model.state import ModelState, state_views
from ferryman_kernels.slots import clear_slots, copy_slots


class ForwardModel(Protocol):
    """A model over paged, slot-indexed state. Both calls give logits [sampled, vocab]."""

    @property
    def manifest(self) -> StateManifest: ...

    @property
    def vocab_size(self) -> int: ...

    def prefill(self, batch: PrefillBatch, state: ModelState) -> Tensor: ...

    def decode(self, batch: DecodeBatch, state: ModelState) -> Tensor: ...


class Drafter(Protocol):
    """How the tokens behind the first wave of a decode step are named."""

    def named(self, batch: DecodeBatch, state: ModelState, group: Group) -> Tensor:
        """All token ids of the batch [tokens]."""
        ...


class AsPlanned:
    """The plan names them, or there are none."""

    def named(self, batch: DecodeBatch, state: ModelState, group: Group) -> Tensor:
        return batch.token_ids


AS_PLANNED: Drafter = AsPlanned()


class Drawing(Protocol):
    """How a rank comes by the tokens of a step."""

    def tokens(self, logits: Tensor, tensors: StepTensors, history: Tensor) -> tuple[Tensor, ...]:
        """Tokens [draws]; behind them values and ids of logprobs, if any draw asks for some."""
        ...


class Sampling:
    """Rank 0 draws."""

    def tokens(self, logits: Tensor, tensors: StepTensors, history: Tensor) -> tuple[Tensor, ...]:
        weighed = _penalised(logits, tensors, history) if "penalties" in tensors else logits
        drawn = sample(weighed, filters_of(tensors)) if "drawn" in tensors else greedy(weighed)
        if "num_best" not in tensors:
            return (drawn,)
        found = log_probabilities(logits, drawn, int(tensors.on_host("num_best")[0]))
        return drawn, found.values, found.token_ids


class Listening:
    """Any other rank makes room for what rank 0 has drawn."""

    def tokens(self, logits: Tensor, tensors: StepTensors, history: Tensor) -> tuple[Tensor, ...]:
        return (torch.empty_like(tensors["draw_rows"]),)


def _penalised(logits: Tensor, tensors: StepTensors, history: Tensor) -> Tensor:
    longest = int(tensors.on_host("draw_positions").max())
    said = history[tensors["draw_rows"], :longest]
    past = Past(said, tensors["prompt_lens"], tensors["draw_positions"])
    return penalise(logits, past, penalties_of(tensors))


class StepRunner:
    """A rank's share of a model, its slabs, and each row's history of token ids.

    Run steps from one thread, in their order. What rank 0 has drawn is told to all: no two ranks
    can come to different tokens.
    """

    def __init__(
        self,
        model: ForwardModel,
        slabs: Slabs,
        group: Group,
        *,
        max_rows: int,
        max_len: int,
        drafter: Drafter = AS_PLANNED,
    ) -> None:
        self._model = model
        self._drafter = drafter
        self._slabs = slabs.tensors
        self._state = state_views(model.manifest, slabs.tensors)
        self._group = group
        self._drawing: Drawing = Sampling() if group.rank == 0 else Listening()
        devices = {slab.device for slab in self._slabs.values()}
        # -1 is no token: a decode step that reads what nobody wrote fails in the embedding.
        shape, device = (max_rows, max_len), devices.pop()
        self._history = torch.full(shape, -1, dtype=torch.int32, device=device)

    @property
    def history_shape(self) -> tuple[int, int]:
        """(rows, tokens)."""
        rows, length = self._history.shape
        return rows, length

    def run(self, tensors: StepTensors) -> tuple[Tensor, ...]:
        """Runs one step as far as the host is concerned: the drafts if there are any, and behind
        them what `Drawing.tokens` gave."""
        self._prologue(tensors)
        logits, found = self._prefill(tensors) if tensors.is_prefill else self._decode(tensors)
        if tensors.on_host("draw_rows").size:
            drawn, *best = self._drawing.tokens(logits, tensors, self._history)
            drawn = self._group.from_first(drawn)
            found += (drawn, *best)
            self._write(tensors["draw_rows"], tensors["draw_positions"], drawn)
        self._epilogue(tensors)
        return found

    def _prologue(self, tensors: StepTensors) -> None:
        if "copies" in tensors:
            copy_slots(self._slabs[Kind.RECURRENT], *tensors["copies"].unbind())
        if "clears" in tensors:
            clear_slots(self._slabs[Kind.RECURRENT], tensors["clears"])
        if "seed_rows" in tensors:
            self._write(tensors["seed_rows"], tensors["seed_positions"], tensors["seed_token_ids"])
        if "saves" in tensors:
            copy_slots(self._slabs[Kind.RECURRENT], *tensors["saves"].unbind())

    def _prefill(self, tensors: StepTensors) -> tuple[Tensor, tuple[Tensor, ...]]:
        self._write(tensors["rows"], tensors["positions"], tensors["token_ids"])
        return self._model.prefill(prefill_batch(tensors), self._state), ()

    def _decode(self, tensors: StepTensors) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Logits, and the drafts as they were consumed."""
        rows, positions = tensors["rows"], tensors["positions"]
        first = int(tensors.on_host("waves")[0])
        token_ids = self._history[rows[:first], positions[:first]].long()
        if "drafts" in tensors:
            token_ids = torch.cat([token_ids, tensors["drafts"]])
        batch = decode_batch(tensors, token_ids)
        token_ids = self._drafter.named(batch, self._state, self._group)
        logits = self._model.decode(replace(batch, token_ids=token_ids), self._state)
        if "drafts" not in tensors:
            return logits, ()
        # Penalties look back on drafts as they would on tokens.
        self._write(rows[first:], positions[first:], token_ids[first:])
        return logits, (token_ids[first:],)

    def _epilogue(self, tensors: StepTensors) -> None:
        if "snapshots" in tensors:
            copy_slots(self._slabs[Kind.RECURRENT], *tensors["snapshots"].unbind())

    def _write(self, rows: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        self._history[rows, positions] = token_ids.to(torch.int32)
