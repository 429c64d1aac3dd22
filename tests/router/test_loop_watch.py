"""Work that holds up the event loop is seen; a loop that is idle is not held up. Histograms."""

from __future__ import annotations

import asyncio
import time

from ferryman.runtime.life import alongside
from ferryman_router.request.metrics import RouterMetrics, watch_loop


class HoldsLoop:
    """The measurements so far."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.came = asyncio.Event()

    def observe(self, value: float) -> None:
        self.seconds.append(value)
        self.came.set()

    async def next(self) -> float:
        self.came.clear()
        await self.came.wait()
        return self.seconds[-1]


def _work(cpu_seconds: float) -> None:
    end = time.process_time() + cpu_seconds
    while time.process_time() < end:
        pass


async def _held_while_others_run(holds: HoldsLoop) -> float:
    """The seconds that are measured while the machine runs other processes."""
    await holds.next()
    time.sleep(0.2)  # noqa: ASYNC251 (stands for such a machine)
    return await holds.next()


async def test_work_on_the_loop_is_measured_and_the_sleep_of_others_is_not() -> None:
    holds = HoldsLoop()
    async with alongside(watch_loop(holds.observe)):
        await holds.next()
        _work(0.2)
        assert await holds.next() > 0.1
        assert any([await _held_while_others_run(holds) < 0.1 for _ in range(4)])


def test_a_histogram_counts_in_seconds() -> None:
    metrics = RouterMetrics()
    metrics.first_token.observe(0.02)
    assert b'ferryman_router_first_token_seconds_bucket{le="0.01"} 0.0' in metrics.render()
    assert b'ferryman_router_first_token_seconds_bucket{le="0.025"} 1.0' in metrics.render()


def test_a_histogram_has_the_sum_of_what_was_observed_so_many_times() -> None:
    """A mean is that sum through the count: the panels of an operator divide them."""
    gaps = RouterMetrics().gap
    gaps.observe(0.25)
    gaps.observe(0.125, 4)
    (family,) = gaps.collect()
    figures = {sample.name.rpartition("_")[2]: sample.value for sample in family.samples}
    assert (figures["sum"], figures["count"]) == (0.75, 5.0)
