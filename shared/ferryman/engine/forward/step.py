"""A step on each rank of a worker, computed from the packed step alone.

prologue   copies, clears, seeds, saves
forward    reads the history for decode, writes it for prefill, both in a mixed step; drafts follow
           what was read
drawing    tokens are drawn by rank 0, sent to all, and written after what was read
epilogue   snapshots
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.engine.forward.decode_forward import (
    Drafter,
    EagerForward,
    GraphCapture,
    GraphedForward,
    StepForward,
)
from ferryman.engine.forward.grammar_masks import GrammarMasks
from ferryman.engine.forward.slot_op_tensors import OpTensors, SlotPairs
from ferryman.engine.forward.step_tensors import DecodeTensors, PrefillTensors, StepTensors
from ferryman.engine.forward.tail_tensors import TailTensors
from ferryman.engine.forward.token_source import token_source
from ferryman.engine.memory.slabs import Slabs
from ferryman.model.sampling.prompt_logprobs import PrefilledRows, head_alone, prompt_logprobs
from ferryman.model.shapes.batch import DecodeBatch, PrefillBatch
from ferryman.model.shapes.ranks import Group
from ferryman.model.shapes.state import LayerCount, ModelState, state_views
from ferryman_kernels.slots import clear_slots, copy_slots


class ForwardModel(Protocol):
    """A model over paged, slot-indexed state. Decoding gives the logits [tokens, vocab] of all."""

    @property
    def manifest(self) -> StateManifest: ...

    def prefill(self, batch: PrefillBatch, state: ModelState) -> PrefilledRows: ...

    def decode(self, batch: DecodeBatch, state: ModelState) -> Tensor: ...


class ForwardMaker(Protocol):
    """Makes the forward of a worker's steps from the one that launches them."""

    def forward_of(self, eager: EagerForward) -> StepForward: ...


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """Graphs for padded chunks, and for padded decode steps of at most `max_tokens` tokens, padding
    included."""

    max_tokens: int
    capture: GraphCapture

    def forward_of(self, eager: EagerForward) -> StepForward:
        return GraphedForward(eager, self.capture, self.max_tokens)


@dataclass(frozen=True, slots=True)
class StepValues:
    """The values of a step: the drafts or the scores, if there are any, and then the tokens with
    their logprobs. `errors` are those of single draws, by their index."""

    arrays: tuple[Tensor, ...]
    errors: Mapping[int, Exception]


class StepRunner:
    """A rank's share of a model, its slabs, and each row's history of token ids.

    Run steps from one thread, in their order. Rank 0 sends its drawn tokens to all, so ranks never
    disagree on a token.
    """

    def __init__(
        self,
        model: ForwardModel,
        slabs: Slabs,
        group: Group,
        *,
        max_rows: int,
        max_len: int,
        drafter: Drafter | None = None,
        masks: GrammarMasks | None = None,
        replays: ForwardMaker | None = None,
    ) -> None:
        self._model = model
        self._slabs = slabs.tensors
        self._state = state_views(model.manifest, slabs.tensors)
        self._token_source = token_source(group, masks)
        self._score = prompt_logprobs if group.rank == 0 else head_alone
        devices = {slab.device for slab in self._slabs.values()}
        # -1 is no token: a decode step that reads an unwritten entry fails in the embedding. A row
        # after those of requests is for padding: its row is -1, and it finds token 0.
        shape, device = (max_rows + 1, max_len), devices.pop()
        self._history = torch.full(shape, -1, dtype=torch.int32, device=device)
        self._history[-1] = 0
        eager = EagerForward(model, drafter, self._state, self._history, group)
        self._forward: StepForward = replays.forward_of(eager) if replays else eager

    @property
    def layers_run(self) -> LayerCount:
        """Moves while a step runs."""
        return self._state.layers_run

    @property
    def history_shape(self) -> tuple[int, int]:
        """(rows, tokens)."""
        rows, length = self._history.shape
        return rows - 1, length

    def run(self, tensors: StepTensors) -> StepValues:
        """Runs one step as far as the host is concerned."""
        self._prologue(tensors.ops)
        if isinstance(tensors, PrefillTensors):
            logits, arrays = self._prefill(tensors)
        elif isinstance(tensors, TailTensors):
            logits, arrays = self._tail(tensors), ()
        else:
            logits, arrays = self._decode(tensors)
        draws, errors = tensors.draws, dict[int, Exception]()
        if draws.count:
            drawn = self._token_source.tokens(logits, draws, self._history)
            arrays += drawn.token_ids, *drawn.best
            errors.update(drawn.errors)
            # A step that is already submitted may read it: any token will do, for its result is
            # dropped.
            readable = drawn.token_ids.clamp_min(0)
            self._write(draws.rows, draws.positions, readable)
        self._copy(tensors.ops.snapshots)
        return StepValues(arrays, errors)

    def _prologue(self, ops: OpTensors) -> None:
        # A copy may read what a clear is about to empty; a save reads what both have left.
        for kind, pairs in ops.copies.items():
            copy_slots(self._slabs[kind], pairs.src, pairs.dst)
        if ops.clears is not None:
            clear_slots(self._slabs[Kind.RECURRENT], ops.clears)
        if ops.seeds is not None:
            self._write(ops.seeds.rows, ops.seeds.positions, ops.seeds.token_ids)
        self._copy(ops.saves)

    def _prefill(self, tensors: PrefillTensors) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Logits of the last tokens, and the scores of the prompts' tokens, if any are asked
        for."""
        batch = tensors.batch_with(self._history)
        self._write(tensors.rows, batch.positions, batch.token_ids)
        prefilled = self._model.prefill(batch, self._state)
        scores = self._score(prefilled, tensors.scored) if tensors.scored else ()
        return prefilled.logits(batch.last_tokens), scores

    def _tail(self, tensors: TailTensors) -> Tensor:
        """Logits of the chunk's last token [1, vocab]."""
        tokens = slice(len(tensors.rows))
        self._write(tensors.rows, tensors.positions[tokens], tensors.token_ids[tokens])
        return self._forward.run(tensors).logits

    def _decode(self, tensors: DecodeTensors) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Logits of the step's own tokens, and its drafts as they were consumed."""
        forwarded, padding = self._forward.run(tensors), tensors.padding
        logits = forwarded.logits if padding is None else forwarded.logits[padding.kept]
        if tensors.drafts is None:
            return logits, ()
        drafted = slice(tensors.waves[0], None) if padding is None else padding.drafted
        named = forwarded.token_ids[drafted]
        # Penalties count drafts as they count tokens.
        self._write(tensors.rows[drafted], tensors.positions[drafted], named)
        return logits, (named,)

    def _copy(self, pairs: SlotPairs | None) -> None:
        if pairs is not None:
            copy_slots(self._slabs[Kind.RECURRENT], pairs.src, pairs.dst)

    def _write(self, rows: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        self._history[rows, positions] = token_ids.to(torch.int32)
