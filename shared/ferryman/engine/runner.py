"""Runs steps on a model, on this rank and those that share it, in the order of the calls.

    on the host     slot operations are handed out once, whatever is replayed; loads are awaited
    on each rank    the packed step (engine/step.py), behind its loads

Nothing but drawn tokens (and logprobs that were asked for) comes back from the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ferryman.engine.copy_stream import Copies
from ferryman.engine.device import Device, Fetched, HostDevice
from ferryman.engine.loads import AT_ONCE, HostTier, Loaded
from ferryman.engine.ops import OnceOnly
from ferryman.engine.others import NO_OTHERS, Others, Told
from ferryman.engine.packing import StepTensors, pack
from ferryman.engine.slabs import Slabs
from ferryman.engine.step import AS_PLANNED, Drafter, ForwardModel, StepRunner
from ferryman.schedule.batch import DecodeStep, Draw, Ints, Sampled, StepOutcome, StepPlan

HOST = HostDevice()


class Runner:
    """Rank 0 of a worker: its share of the model, and the `others` that run each step beside it.

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
        others: Others = NO_OTHERS,
        drafter: Drafter = AS_PLANNED,
    ) -> None:
        side = device.copy_side()
        self.transfer = others.transfer_of(slabs, side)
        self.host_tier = HostTier(self.transfer, copies, side)
        self.once = OnceOnly()
        self.device = device
        self._others = others
        self._steps = StepRunner(
            model, slabs, others.group, max_rows=max_rows, max_len=max_len, drafter=drafter
        )

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
        told = self._others.tell(packed, loaded.fence)
        timed = self.device.begin()
        found = self._steps.run(StepTensors(packed, self.device.upload(packed.buffer)))
        return Launched(plan, loaded, timed.fetch(found), told)

    def _check_bounds(self, draws: Sequence[Draw]) -> None:
        rows, length = self._steps.history_shape
        for draw in draws:
            if not (0 <= draw.row < rows and 0 <= draw.position < length):
                raise IndexError(
                    f"a token at position {draw.position} of row {draw.row} does not fit the "
                    f"history of {rows} rows × {length} tokens"
                )


class Launched:
    """A step whose values are on their way back."""

    def __init__(self, plan: StepPlan, loaded: Loaded, fetched: Fetched, told: Told) -> None:
        self._plan = plan
        self._loaded = loaded
        self._fetched = fetched
        self._told = told

    def is_ready(self) -> bool:
        return self._fetched.is_ready() and self._told.is_answered()

    def outcome(self) -> StepOutcome:
        """The values; waits for them, and for the other ranks, if need be."""
        self._told.wait()
        plan, arrays = self._plan, self._fetched.arrays()
        num_named = int(isinstance(plan, DecodeStep) and bool(plan.drafts))
        return StepOutcome(
            plan.step_id,
            _as_sampled(plan.draws, arrays[num_named:]),
            self._loaded.corrupt,
            self._fetched.seconds(),
            self._loaded.report(),
            tuple(token for named in arrays[:num_named] for token in named.tolist()),
        )


def _as_sampled(draws: Sequence[Draw], arrays: Sequence[Ints]) -> tuple[Sampled, ...]:
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
