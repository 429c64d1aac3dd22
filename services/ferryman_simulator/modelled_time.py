"""The time of a simulation: an event loop whose clock leaps, and the seconds that acts cost.

When nothing is left to do now, the clock jumps to the next timer: the workers' own coroutines run
as in a service, but without waiting. Nothing else is modelled: the services' own code decides.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from ferryman.cache.resume import FIRST_GUESS, ResumeCosts
from ferryman.errors import ConfigError
from ferryman.schedule.batch import DecodeStep, MixedStep, StepPlan
from ferryman_simulator.trace import MeasuredPace

T = TypeVar("T")


class Stalled(RuntimeError):
    """Every coroutine waits for another one: no event can happen any more."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is in seconds from 0 and advances by the time that would have been waited."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Leaping(self))

    def time(self) -> float:
        return self._now

    def leap(self, seconds: float) -> None:
        self._now += seconds


class _Leaping(selectors.DefaultSelector):
    """Waits for no input, because there is none: a wait only moves the clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stalled("nothing will ever happen again")
        self._loop.leap(timeout)
        return []


def run(job: Coroutine[Any, Any, T]) -> T:
    """Runs a job in virtual time, to its end."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(job)


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds. A step takes at least `step_seconds`; `call_seconds` is one rpc.

    Loads are host → device, stores device → host, storage reads disk → host. With a fixed
    concurrency, `client_seconds` pass between an answer and the next request.
    """

    prefill_seconds_per_token: float = FIRST_GUESS.prefill_seconds_per_token
    step_seconds: float = 1e-3
    decode_step_seconds: float = 2e-2
    load_seconds_per_byte: float = FIRST_GUESS.load_seconds_per_byte
    store_seconds_per_byte: float = 1 / 5e9
    storage_seconds_per_byte: float = 1 / 1e9
    handoff_seconds_per_byte: float = 1 / 1e9
    call_seconds: float = 1e-3
    client_seconds: float = 1e-2

    def __post_init__(self) -> None:
        for cost in fields(self):
            if not 0 <= getattr(self, cost.name) < 1e6:
                raise ConfigError(f"{cost.name} must be a number of seconds from 0 on")

    @property
    def plan_costs(self) -> ResumeCosts:
        """The costs that a worker's planner would have measured by now."""
        return ResumeCosts(self.prefill_seconds_per_token, self.load_seconds_per_byte)

    def seconds_of(self, plan: StepPlan) -> float:
        """The device time of one step; loads come before the forward."""
        if isinstance(plan, MixedStep):
            prompts = self.seconds_of(plan.prompts) - self.step_seconds
            return prompts + self.decode_step_seconds
        if isinstance(plan, DecodeStep):
            return self.decode_step_seconds
        num_tokens = sum(chunk.end - chunk.start for chunk in plan.chunks)
        load_bytes = sum(load.unit.num_bytes for load in plan.ops.loads)
        forward = self.step_seconds + num_tokens * self.prefill_seconds_per_token
        return forward + load_bytes * self.load_seconds_per_byte

    def with_values(self, seconds: Mapping[str, float]) -> CostModel:
        """The costs with others in place of some, by name."""
        return replace(self, **seconds)

    def told_by(self, pace: MeasuredPace) -> CostModel:
        """The costs with times measured in a trace in place of the guesses."""
        return replace(
            self,
            prefill_seconds_per_token=pace.prefill_seconds_per_token
            or self.prefill_seconds_per_token,
            decode_step_seconds=pace.decode_step_seconds or self.decode_step_seconds,
        )


GUESSES = CostModel()
