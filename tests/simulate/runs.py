"""Small setups and traces for tests of the simulator."""

from __future__ import annotations

from ferryman.cache.capacity import Concurrency
from ferryman.cache.manifest import Kind, KindLayout, StateManifest
from ferryman.schedule.limits import SchedulerLimits
from ferryman.tiers.layout import ArenaLayout, split_arena
from ferryman_simulator.modelled_time import run
from ferryman_simulator.result import Result
from ferryman_simulator.setup import Setup, WorkerShape
from ferryman_simulator.simulation import Simulation
from ferryman_simulator.trace import SyntheticPrompt, Trace, TracedRequest, own

PAGE = 16
PAGE_BYTES, STATE_BYTES = 4096, 8192
HYBRID = StateManifest(
    "simulated",
    PAGE,
    PAGE,
    0,
    (KindLayout(Kind.FULL, (), PAGE_BYTES), KindLayout(Kind.RECURRENT, (), STATE_BYTES)),
)


def setup_of(
    *, pages: int = 500, states: int = 60, host_bytes: int = 0, concurrency: int = 1
) -> Setup:
    """A prefill and a decode worker of the same size."""
    slots = {Kind.FULL: pages, Kind.RECURRENT: states}
    limits = SchedulerLimits(Concurrency(4, 4, 2), 64, pages * PAGE, 1000, 2, True)
    worker = WorkerShape(slots, limits)
    arena = split_arena(HYBRID, host_bytes, 0.5) if host_bytes else ArenaLayout({})
    return Setup(HYBRID, worker, worker, arena, concurrency=concurrency)


def asked(*contents: tuple[SyntheticPrompt, int], output_len: int = 5) -> Trace:
    """Requests one second apart: (content, prompt tokens), each with an answer of its own."""
    return Trace(
        [
            TracedRequest(f"r{i}", float(i), content.first(n).then(own(i, output_len)), n)
            for i, (content, n) in enumerate(contents)
        ]
    )


def named(*names: int, length: int = 64) -> SyntheticPrompt:
    """Stretches of `length` tokens."""
    return SyntheticPrompt(tuple(names), (length,) * len(names))


def run_pair(setup: Setup, trace: Trace) -> tuple[Simulation, Result]:
    """The pair as it stands after a run, and what the run came to."""

    async def running() -> tuple[Simulation, Result]:
        pair = Simulation(setup)
        return pair, await pair.run(trace)

    return run(running())
