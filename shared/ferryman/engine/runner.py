"""Runs steps on a model, on this rank and those that share it, in the order of the calls.

    on the host     slot operations are handed out once, whatever is replayed; loads are awaited
    on each rank    the packed step (engine/step.py), behind its loads

Only drawn tokens (and requested logprobs) come back from the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ferryman.engine.copy_stream import Copies
from ferryman.engine.decode_forward import Drafter
from ferryman.engine.device import Arrays, ComputeDevice, FetchedStep, HostDevice
from ferryman.engine.grammar_masks import GrammarMasks, guided_draws
from ferryman.engine.loads import AT_ONCE, LoadedUnits, LoadQueue
from ferryman.engine.ops import OnceOnly
from ferryman.engine.packed_step import pack
from ferryman.engine.slabs import Slabs
from ferryman.engine.step import AS_PLANNED, ForwardMaker, ForwardModel, StepRunner
from ferryman.engine.step_tensors import unpack
from ferryman.engine.tensor_parallel.channel import SentStep
from ferryman.engine.tensor_parallel.group import TpGroup
from ferryman.engine.transfer import transfer_of
from ferryman.model.shapes.ranks import SINGLE_RANK
from ferryman.model.shapes.state import LayerCount
from ferryman.schedule.batch import (
    DecodeStep,
    Ints,
    PrefillStep,
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
        drafter: Drafter = AS_PLANNED,
        masks: GrammarMasks | None = None,
        sizes: StepSizes | None = None,
        replays: ForwardMaker | None = None,
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
        packed = pack(plan, self._sizes)
        loaded = self.host_tier.arrived(plan.step_id, plan.ops.loads)
        sent = self._ranks.send(packed, loaded.fence) if self._ranks else None
        timed = self.device.begin()
        uploaded = self.device.upload(packed.buffer)
        found = self._steps.run(unpack(packed, uploaded, guided_draws(plan.draws)))
        return DeviceStep(plan, loaded, timed.fetch(found), sent)

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
        self, plan: StepPlan, loaded: LoadedUnits, fetched: FetchedStep, sent: SentStep | None
    ) -> None:
        self._plan = plan
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
        wanted = plan.scores if isinstance(plan, PrefillStep) else ()
        num_scored = _NUM_SCORE_ARRAYS if wanted else 0
        num_named = num_scored + int(isinstance(plan, DecodeStep) and bool(plan.drafts))
        return StepOutcome(
            plan.step_id,
            _as_sampled(plan.draws, arrays[num_named:]),
            self._loaded.corrupt,
            self._fetched.seconds(),
            self._loaded.report(),
            tuple(token for named in arrays[num_scored:num_named] for token in named.tolist()),
            _as_scores(wanted, arrays[:num_scored]),
        )


_NUM_SCORE_ARRAYS = 3


def _as_scores(wanted: Sequence[ScoreRequest], arrays: Arrays) -> tuple[PromptScores, ...]:
    """Each request's part of the scores of a step, with as many alternatives as it asked for."""
    if not wanted:
        return ()
    values, token_ids, ranks = arrays
    ends = np.cumsum([len(each.token_ids) for each in wanted])
    return tuple(
        PromptScores(
            each.first,
            token_ids[end - len(each.token_ids) : end, : 1 + each.num_best].astype("<u4"),
            values[end - len(each.token_ids) : end, : 1 + each.num_best].astype(np.float64),
            ranks[end - len(each.token_ids) : end].astype(np.uint32),
        )
        for each, end in zip(wanted, ends.tolist(), strict=True)
    )


def _as_sampled(draws: Sequence[SampleRequest], arrays: Sequence[Ints]) -> tuple[Sampled, ...]:
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
    """The chosen token first; then as many of the likeliest as this draw asked for."""
    if count == 0:
        return {}
    return dict(zip(token_ids[: 1 + count], values[: 1 + count], strict=True))
