"""Open-loop arrivals at several times what a cluster can do: by hand, some minutes.

    python -m tools.campaigns.overload --busy 2 --runs 5

Two clusters of real processes with a tiny model, beside `--busy` processes that take all the time
they get. To one come requests by chance (Poisson), `factor` times what the other one can do just
then: its callers ask again as soon as they have their answer. A run has a phase for each factor,
with the two clusters in turn, and ends with 0.5x: the overload is over, and soon nobody is refused.

    ratio = goodput of the one / capacity of the other, in the same seconds

Goodput counts the answers that came within their deadline, capacity all tokens over those of an
answer, from some seconds after a phase's first arrival to its last. The two have the same processes
and the same neighbours. So a machine whose speed changes from one second to the next, because
others use it, changes both; of a capacity that was measured a moment before it would make nothing.

The callers stand for those of other machines: they have the processor before the clusters and their
neighbours, or their own delays would be counted as the clusters'.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.harness.cluster import Cluster, ClusterShape, running_cluster, save_served_model
from tools.campaigns.busy_machine import BusyProcesses, cpu_seconds
from tools.campaigns.offered_load import (
    ClosedLoop,
    LoadOutcome,
    LoadPhase,
    OfferedLoad,
    open_loop,
    recovery_seconds,
)

from ferryman.client import Client
from ferryman.client.retries import Retries
from ferryman.runtime.life import alongside

VARIANT = "granite_nope"
LEAST_RATIO = 0.8
LATE_SECONDS = 0.5
RECOVERY_SECONDS = 30.0
WARM_SECONDS = 4.0  # at least: half of a deadline, so that the first ones have ended
CALLERS_NICENESS = -10
RESERVED = 8  # rows of a decode worker beyond those that run
AFTERWARDS = 0.5  # times the capacity
NO_RETRIES = Retries(max_failures=0)


@dataclass(frozen=True)
class MeasuredPhase:
    """A phase at one cluster, and what another one could do meanwhile, in answers a second."""

    factor: float
    phase: LoadPhase
    capacity: float


@dataclass
class OverloadRun:
    """The results of one run."""

    measured: list[MeasuredPhase] = field(default_factory=list)
    recovered: float = 0.0

    @property
    def factors(self) -> list[float]:
        return sorted({one.factor for one in self.measured})

    def ratio(self, factor: float) -> float:
        """Goodput over capacity."""
        of_factor = [one for one in self.measured if one.factor == factor]
        return sum(one.phase.goodput for one in of_factor) / sum(one.capacity for one in of_factor)

    def faults(self, load: OfferedLoad) -> list[str]:
        """The reasons why this run is not good."""
        phases = [one.phase for one in self.measured]
        late = max(phase.latest_end for phase in phases) - load.deadline_seconds
        untyped = sum(phase.untyped_refusals for phase in phases)
        low = [f for f in self.factors if f > 1 and self.ratio(f) < LEAST_RATIO]
        return [
            *(f"goodput at {factor:g}x is {self.ratio(factor):.2f} of capacity" for factor in low),
            *([f"an end {late:.2f} s after the deadline"] if late > LATE_SECONDS else []),
            *([f"{untyped} refusals without a time"] if untyped else []),
            *(["refusals after the overload"] if self.recovered > RECOVERY_SECONDS else []),
        ]

    def __str__(self) -> str:
        capacities = [one.capacity for one in self.measured]
        ratios = ", ".join(f"{factor:g}x {self.ratio(factor):.2f}" for factor in self.factors)
        return (
            f"capacity {min(capacities):.1f} to {max(capacities):.1f}/s; goodput of capacity: "
            f"{ratios}; recovered after {self.recovered:.1f} s"
        )


@dataclass(frozen=True)
class OverloadedSide:
    """One of the two clusters, its client, and its processes by name."""

    cluster: Cluster
    client: Client

    @property
    def pids(self) -> dict[str, int]:
        return {one.role: one.process.pid for one in self.cluster.services}

    @property
    def num_callers(self) -> int:
        """Twice as many as it has rows."""
        shape = self.cluster.shape
        return 2 * (shape.max_running + RESERVED) * shape.num_decode


class OverloadCampaign:
    """One run after another; the two sides take turns."""

    def __init__(
        self,
        sides: Sequence[OverloadedSide],
        load: OfferedLoad,
        factors: Sequence[float],
        seconds: float,
        busy: BusyProcesses,
    ) -> None:
        self._sides = list(sides)
        self._load, self._factors, self._seconds, self._busy = load, factors, seconds, busy
        self._warm = max(WARM_SECONDS, load.deadline_seconds / 2)
        self._rng = random.Random(7)

    async def run(self) -> OverloadRun:
        result = OverloadRun()
        for factor in self._factors:
            measured, _ = await self._phase(factor)
            result.measured.append(measured)
        _, outcomes = await self._phase(AFTERWARDS)
        result.recovered = recovery_seconds(outcomes)
        return result

    async def _phase(self, factor: float) -> tuple[MeasuredPhase, list[LoadOutcome]]:
        self._sides.reverse()
        (side, other), load = self._sides, self._load
        pids = side.pids | {"callers": os.getpid(), "other decode": other.pids["decode"]}
        loop = ClosedLoop(other.client, load, other.num_callers)
        async with alongside(loop.run()):
            await asyncio.sleep(self._warm)
            before = cpu_seconds(pids)
            arrivals = open_loop(
                side.client,
                load,
                lambda: factor * loop.rate(),
                self._warm + self._seconds,
                self._rng,
            )
            arriving = asyncio.ensure_future(arrivals)
            await asyncio.sleep(self._warm)
            warm = loop.num_answers
            await asyncio.sleep(self._seconds)
            capacity = (loop.num_answers - warm) / self._seconds
            whole = self._warm + self._seconds
            cores = {name: (s - before[name]) / whole for name, s in cpu_seconds(pids).items()}
        outcomes = await arriving
        phase = LoadPhase.of(f"{factor:g}x", (self._warm, whole), outcomes)
        measured = MeasuredPhase(factor, phase, round(capacity, 2))
        shown = {
            "cores": {name: round(value, 2) for name, value in cores.items()},
            "busy seconds": round(self._busy.check(), 1),
            "machine load": round(os.getloadavg()[0], 1),
        }
        print(json.dumps(asdict(measured) | shown), flush=True)
        return measured, outcomes


async def measure(
    clusters: Sequence[Cluster], load: OfferedLoad, given: argparse.Namespace, busy: BusyProcesses
) -> bool:
    """Whether each of the runs was good."""
    results: list[OverloadRun] = []
    async with (
        Client(clusters[0].grpc, retries=NO_RETRIES) as one,
        Client(clusters[1].grpc, retries=NO_RETRIES) as another,
    ):
        sides = [OverloadedSide(clusters[0], one), OverloadedSide(clusters[1], another)]
        campaign = OverloadCampaign(sides, load, given.factors, given.seconds, busy)
        for number in range(given.runs):
            results.append(await campaign.run())
            print(f"run {number + 1}: {results[-1]}", flush=True)
            print(*results[-1].faults(load), sep="\n", flush=True)
    good = [not result.faults(load) for result in results]
    print(f"{sum(good)} of {given.runs} runs are good: each ratio at least {LEAST_RATIO}")
    return all(good)


def prefer_callers() -> None:
    """Only root may; without it the callers compete with all the others."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, CALLERS_NICENESS)


@contextmanager
def two_clusters(folder: Path, max_running: int) -> Iterator[tuple[Cluster, Cluster]]:
    (folder / "model").mkdir()
    model = save_served_model(folder / "model", VARIANT)
    shape = ClusterShape(max_running=max_running, dtype="float32")
    folders = [folder / "one", folder / "another"]
    for each in folders:
        each.mkdir()
    with (
        running_cluster(model, folders[0], shape) as one,
        running_cluster(model, folders[1], shape) as another,
    ):
        yield one, another
        one.assert_ledgers_balance()
        another.assert_ledgers_balance()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=16.0, help="of each phase")
    parser.add_argument("--factors", type=float, nargs="+", default=[1.0, 2.0, 5.0])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--busy", type=int, default=0, help="processes that take all they get")
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--deadline", type=float, default=6.0)
    parser.add_argument("--max-running", type=int, default=4)
    return parser.parse_args()


def main() -> int:
    given = parsed()
    load = OfferedLoad(given.prompt_len, given.max_tokens, given.deadline)
    with (
        tempfile.TemporaryDirectory() as name,
        two_clusters(Path(name), given.max_running) as clusters,
        BusyProcesses(given.busy) as busy,
    ):
        prefer_callers()
        is_good = asyncio.run(measure(clusters, load, given, busy))
    return 0 if is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
