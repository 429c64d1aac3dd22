"""Runs steps on a model: prologue, forward, sampling, epilogue, in the order of the calls.

    prologue   waits for loads; copies, clears, seeds           once, whatever is replayed
    forward    reads the history for decode, writes it for prefill
    sampling   draws tokens and writes them behind, where the next step finds them on the device
    epilogue   snapshots                                        once

Nothing but drawn tokens (and logprobs that were asked for) comes back from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.engine.copy_stream import Copies
from ferryman.engine.device import Device, Fetched, HostDevice
from ferryman.engine.device_transfer import transfer_of
from ferryman.engine.loads import AT_ONCE, HostTier, Loaded
from ferryman.engine.ops import OnceOnly
from ferryman.engine.packing import (
    StepTensors,
    decode_batch,
    filters_of,
    pack,
    penalties_of,
    prefill_batch,
)
from ferryman.engine.slabs import Slabs
from ferryman.model.batch import DecodeBatch, PrefillBatch
from ferryman.model.sampler import Past, greedy, log_probabilities, penalise, sample
from ferryman.model.state import ModelState, state_views
from ferryman.schedule.batch import DecodeStep, Draw, PrefillStep, Sampled, StepOutcome, StepPlan
from ferryman_kernels.slots import clear_slots, copy_slots


class ForwardModel(Protocol):
    """A model over paged, slot-indexed state. Both calls give logits [sampled, vocab]."""

    @property
    def manifest(self) -> StateManifest: ...

    @property
    def vocab_size(self) -> int: ...

    def prefill(self, batch: PrefillBatch, state: ModelState) -> Tensor: ...

    def decode(self, batch: DecodeBatch, state: ModelState) -> Tensor: ...


HOST = HostDevice()


class Runner:
    """A model, its slabs and each row's history of token ids [max_rows, max_len].

    Launch steps from one thread, in their order. `copies` is where loads run: by default within
    the call that begins them.
    """

    def __init__(
        self,
        model: ForwardModel,
        slabs: Slabs,
        *,
        max_rows: int,
        max_len: int,
        device: Device = HOST,
        copies: Copies = AT_ONCE,
    ) -> None:
        side = device.copy_side()
        self.transfer = transfer_of(slabs, side)
        self.host_tier = HostTier(self.transfer, copies, side)
        self.once = OnceOnly()
        self.device = device
        self._model = model
        self._slabs = slabs.tensors
        self._state = state_views(model.manifest, slabs.tensors)
        # -1 is no token: a decode step that reads what nobody wrote fails in the embedding.
        shape = (max_rows, max_len)
        self._history = torch.full(shape, -1, dtype=torch.int32, device=device.torch_device)

    def run(self, plan: StepPlan) -> StepOutcome:
        """Runs one step to its end."""
        return self.launch(plan).outcome()

    def begin(self, plan: StepPlan) -> None:
        """Starts the plan's loads on the copy stream; the launch waits for them."""
        self.host_tier.begin(plan.step_id, plan.ops.loads)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Runs one step as far as the host is concerned; its values may still be on their way."""
        plan = self.once.consume(plan)
        self._check_bounds(plan.draws)
        packed = pack(plan)
        loaded = self.host_tier.arrived(plan.step_id, plan.ops.loads)
        timed = self.device.begin()
        tensors = StepTensors(packed, self.device.upload(packed.buffer))
        self._prologue(tensors)
        found = self._sampled(plan.draws, self._forward(plan, tensors), tensors)
        self._epilogue(tensors)
        return Launched(plan, loaded, timed.fetch(found))

    def _check_bounds(self, draws: Sequence[Draw]) -> None:
        rows, length = self._history.shape
        for draw in draws:
            if not (0 <= draw.row < rows and 0 <= draw.position < length):
                raise IndexError(
                    f"a token at position {draw.position} of row {draw.row} does not fit the "
                    f"history of {rows} rows × {length} tokens"
                )

    def _prologue(self, tensors: StepTensors) -> None:
        if "copies" in tensors:
            copy_slots(self._slabs[Kind.RECURRENT], *tensors["copies"].unbind())
        if "clears" in tensors:
            clear_slots(self._slabs[Kind.RECURRENT], tensors["clears"])
        if "seed_rows" in tensors:
            self._write(tensors["seed_rows"], tensors["seed_positions"], tensors["seed_token_ids"])

    def _forward(self, plan: StepPlan, tensors: StepTensors) -> Tensor:
        rows, positions = tensors["rows"], tensors["positions"]
        if isinstance(plan, PrefillStep):
            self._write(rows, positions, tensors["token_ids"])
            return self._model.prefill(prefill_batch(plan, tensors), self._state)
        token_ids = self._history[rows, positions].long()
        return self._model.decode(decode_batch(plan, tensors, token_ids), self._state)

    def _sampled(
        self, draws: Sequence[Draw], logits: Tensor, tensors: StepTensors
    ) -> tuple[Tensor, ...]:
        """Tokens [draws]; behind them values and ids of logprobs, if any draw asks for some."""
        if not draws:
            return ()
        weighed = self._penalised(draws, logits, tensors) if "penalties" in tensors else logits
        tokens = sample(weighed, filters_of(tensors)) if "drawn" in tensors else greedy(weighed)
        self._write(tensors["draw_rows"], tensors["draw_positions"], tokens)
        num_best = max(draw.params.logprobs for draw in draws)
        if num_best == 0:
            return (tokens,)
        found = log_probabilities(logits, tokens, num_best)
        return tokens, found.values, found.token_ids

    def _penalised(self, draws: Sequence[Draw], logits: Tensor, tensors: StepTensors) -> Tensor:
        longest = max(draw.position for draw in draws)
        said = self._history[tensors["draw_rows"], :longest]
        past = Past(said, tensors["prompt_lens"], tensors["draw_positions"])
        return penalise(logits, past, penalties_of(tensors))

    def _epilogue(self, tensors: StepTensors) -> None:
        if "snapshots" in tensors:
            copy_slots(self._slabs[Kind.RECURRENT], *tensors["snapshots"].unbind())

    def _write(self, rows: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        self._history[rows, positions] = token_ids.to(torch.int32)


class Launched:
    """A step whose values are on their way back."""

    def __init__(self, plan: PrefillStep | DecodeStep, loaded: Loaded, fetched: Fetched) -> None:
        self._plan = plan
        self._loaded = loaded
        self._fetched = fetched

    def is_ready(self) -> bool:
        return self._fetched.is_ready()

    def outcome(self) -> StepOutcome:
        """The values; waits for them if need be."""
        sampled = _as_sampled(self._plan.draws, self._fetched)
        seconds = self._fetched.seconds()
        loaded = self._loaded
        return StepOutcome(self._plan.step_id, sampled, loaded.corrupt, seconds, loaded.report())


def _as_sampled(draws: Sequence[Draw], fetched: Fetched) -> tuple[Sampled, ...]:
    arrays = fetched.arrays()
    if not arrays:
        return ()
    tokens = arrays[0].tolist()
    if len(arrays) == 1:
        return tuple(Sampled(token, {}) for token in tokens)
    values, token_ids = arrays[1].tolist(), arrays[2].tolist()
    return tuple(
        Sampled(token, _logprobs(draw.params.logprobs, of_ids, of_values))
        for draw, token, of_ids, of_values in zip(draws, tokens, token_ids, values, strict=True)
    )


def _logprobs(count: int, token_ids: Sequence[int], values: Sequence[float]) -> dict[int, float]:
    """The first is the chosen token; then as many of the likeliest as this draw asked for."""
    if count == 0:
        return {}
    return dict(zip(token_ids[: 1 + count], values[: 1 + count], strict=True))
