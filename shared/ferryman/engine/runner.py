"""Runs steps on a model, on this rank and those that share it, in the order of the calls.

    on the host     slot operations are handed out once, replays or not; loads are awaited
    on each rank    the packed step (engine/forward/step.py), after its loads

Only drawn tokens (and requested logprobs) come back from the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ferryman.engine.device import Arrays, ComputeDevice, FetchedStep, HostDevice
from ferryman.engine.forward.decode_forward import Drafter
from ferryman.engine.forward.grammar_masks import GrammarMasks
from ferryman.engine.forward.prepared_step import PreparedStep, prepare
from ferryman.engine.forward.step import ForwardMaker, ForwardModel, StepRunner
from ferryman.engine.forward.step_tensors import unpack
from ferryman.engine.memory.copy_stream import Copies
from ferryman.engine.memory.loads import AT_ONCE, LoadedUnits, LoadQueue
from ferryman.engine.memory.slabs import Slabs
from ferryman.engine.memory.transfer import transfer_of
from ferryman.engine.ops import OnceOnly
from ferryman.engine.tensor_parallel.channel import SentStep
from ferryman.engine.tensor_parallel.group import TpGroup
from ferryman.model.shapes.ranks import SINGLE_RANK
from ferryman.model.shapes.state import LayerCount
from ferryman.schedule.batch import (
    NO_DRAW,
    DecodeStep,
    FailedDraw,
    Ints,
    Sampled,
    SampleRequest,
    StepOutcome,
    StepPlan,
)
from ferryman.schedule.prompt_scores import PromptScores, ScoreRequest
from ferryman.schedule.step_sizes import StepSizes

HOST = HostDevice()


class Runner:
    """Rank 0 of a worker: its share of the model, and the other `ranks`, which run each step too.

    Launch steps from one thread, in their order. `copies` runs the loads: by default within the
    call that begins them. If there are `sizes`, decode steps are padded to one of them. Those that
    `replays` knows are replayed.
    """

    def __init__(
        self,
        model: ForwardModel,
        slabs: Slabs,
        *,
        max_rows: int,
        max_len: int,
        device: ComputeDevice = HOST,
        copies: Copies = AT_ONCE,
        ranks: TpGroup | None = None,
        drafter: Drafter | None = None,
        masks: GrammarMasks | None = None,
        sizes: StepSizes | None = None,
        replays: ForwardMaker | None = None,
        num_adapters: int = 0,
    ) -> None:
        side, own_side = device.copy_side(), device.copy_side()
        self.transfer = ranks.transfer_of(slabs) if ranks else transfer_of(slabs, side, own_side)
        self.host_tier = LoadQueue(self.transfer, copies, side)
        self.once = OnceOnly()
        self.device = device
        self._ranks = ranks
        group = ranks.group if ranks else SINGLE_RANK
        self._steps = StepRunner(
            model,
            slabs,
            group,
            max_rows=max_rows,
            max_len=max_len,
            drafter=drafter,
            masks=masks,
            replays=replays,
        )
        self._sizes = sizes
        self._num_adapters = num_adapters

    @property
    def layers_run(self) -> LayerCount:
        """Moves while a step runs."""
        return self._steps.layers_run

    def run(self, plan: StepPlan) -> StepOutcome:
        """Runs one step to its end."""
        return self.launch(plan).outcome()

    def begin(self, plan: StepPlan) -> None:
        """Starts the plan's loads on the copy stream; the launch waits for them."""
        self.host_tier.begin(plan.step_id, plan.ops.loads)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> DeviceStep:
        """Runs one step as far as the host is concerned; its values may arrive later."""
        plan = self.once.consume(plan)
        self._check_bounds(plan.draws)
        step = prepare(plan, self._sizes, self._num_adapters)
        loaded = self.host_tier.arrived(plan.step_id, plan.ops.loads)
        sent = self._ranks.send(step.packed, loaded.fence) if self._ranks else None
        timed = self.device.begin()
        uploaded = self.device.upload(step.packed.buffer)
        values = self._steps.run(unpack(step.packed, uploaded, step.plan.draws))
        return DeviceStep(step, loaded, timed.fetch(values.arrays), sent, values.errors)

    def _check_bounds(self, draws: Sequence[SampleRequest]) -> None:
        rows, length = self._steps.history_shape
        for draw in draws:
            if not (0 <= draw.row < rows and 0 <= draw.position < length):
                raise IndexError(
                    f"a token at position {draw.position} of row {draw.row} does not fit the "
                    f"history of {rows} rows × {length} tokens"
                )


class DeviceStep:
    """A step whose values are still coming back."""

    def __init__(
        self,
        step: PreparedStep,
        loaded: LoadedUnits,
        fetched: FetchedStep,
        sent: SentStep | None,
        errors: Mapping[int, Exception],
    ) -> None:
        """`errors` are those of single draws, by their index."""
        self._plan, self._failed, self._errors = step.plan, step.failed, errors
        self._loaded = loaded
        self._fetched = fetched
        self._sent = sent

    def is_ready(self) -> bool:
        return self._fetched.is_ready() and (self._sent is None or self._sent.has_reply())

    def outcome(self) -> StepOutcome:
        """The values; waits for them and for the other ranks if necessary."""
        if self._sent is not None:
            self._sent.wait()
        plan, arrays = self._plan, self._fetched.arrays()
        wanted = () if isinstance(plan, DecodeStep) else plan.scores
        num_scored = _NUM_SCORE_ARRAYS if wanted else 0
        num_named = num_scored + int(isinstance(plan, DecodeStep) and bool(plan.drafts))
        return StepOutcome(
            plan.step_id,
            _as_sampled(plan.draws, arrays[num_named:], self._errors),
            self._loaded.corrupt,
            self._fetched.seconds(),
            self._loaded.report(),
            tuple(token for named in arrays[num_scored:num_named] for token in named.tolist()),
            _as_scores(wanted, arrays[:num_scored]),
            self._failed,
        )


_NUM_SCORE_ARRAYS = 3


def _as_scores(wanted: Sequence[ScoreRequest], arrays: Arrays) -> tuple[PromptScores, ...]:
    """Each request's part of the scores of a step, with as many alternatives as it asked for."""
    if not wanted:
        return ()
    values, token_ids, ranks = arrays
    ends = np.cumsum([len(request.token_ids) for request in wanted])
    return tuple(
        PromptScores(
            request.first,
            token_ids[end - len(request.token_ids) : end, : 1 + request.num_best].astype("<u4"),
            values[end - len(request.token_ids) : end, : 1 + request.num_best].astype(np.float64),
            ranks[end - len(request.token_ids) : end].astype(np.uint32),
        )
        for request, end in zip(wanted, ends.tolist(), strict=True)
    )


def _as_sampled(
    draws: Sequence[SampleRequest], arrays: Sequence[Ints], errors: Mapping[int, Exception]
) -> tuple[Sampled, ...]:
    if not arrays:
        return ()
    tokens, best = arrays[0].tolist(), [array.tolist() for array in arrays[1:]]
    if not (best or errors):
        return tuple(Sampled(token, {}) for token in tokens)
    return tuple(
        FailedDraw(NO_DRAW, {}, errors[index])
        if index in errors
        else _one_sampled(draw, tokens[index], [column[index] for column in best])
        for index, draw in enumerate(draws)
    )


def _one_sampled(draw: SampleRequest, token: int, best: Sequence[Sequence[Any]]) -> Sampled:
    """A token with its logprobs; `best` are values and ids, if any draw of the step has some."""
    if not best:
        return Sampled(token, {})
    values, token_ids = best
    try:
        return Sampled(token, _logprobs(draw.params.logprobs, token_ids, values))
    except Exception as error:  # any error goes to the caller of the request
        return FailedDraw(NO_DRAW, {}, error)


def _logprobs(count: int, token_ids: Sequence[int], values: Sequence[float]) -> dict[int, float]:
    """The chosen token first; then as many of the likeliest as this draw asked for."""
    if count == 0:
        return {}
    return dict(zip(token_ids[: 1 + count], values[: 1 + count], strict=True))
