"""Open-loop arrivals at once and five times what a cluster can do: by hand, a few minutes.

    python -m tools.campaigns.overload --seconds 20

Real processes with a tiny model. The capacity is measured first, by callers who ask again as soon
as they have their answer. Then requests arrive by chance (Poisson), whatever became of those
before: at capacity, at `--factor` times that, and at half of it, when the overload is over. Goodput
counts answers that were complete within their deadline, by when they arrived.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.harness.cluster import (
    Cluster,
    ClusterShape,
    generate,
    running_cluster,
    save_served_model,
)

from ferryman.client import Client
from ferryman.client.retries import Retries
from ferryman.errors import DeadlineExceeded, Exhausted, FerrymanError
from ferryman.schedule.request import SamplingParams

VARIANT = "granite_nope"
LATE_SECONDS = 0.5
RECOVERY_SECONDS = 30.0
RESERVED = 8  # rows of a decode worker beyond those that run
NO_RETRIES = Retries(max_failures=0)


@dataclass(frozen=True)
class OfferedLoad:
    """The request that every caller sends."""

    prompt_len: int
    max_tokens: int
    deadline_seconds: float

    def prompt(self, rng: random.Random) -> list[int]:
        return [rng.randrange(3, 120) for _ in range(self.prompt_len)]

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class LoadOutcome:
    """The end of one request, in seconds since the phase began; `kind` is "whole" or an error."""

    arrived: float
    seconds: float
    kind: str
    retry_after_seconds: float = 0.0


@dataclass(frozen=True)
class LoadPhase:
    """The results of the requests that arrived in one phase."""

    name: str
    rate: float
    seconds: float
    goodput: float
    kinds: dict[str, int]
    latest_end: float
    worst_refusal: float
    untyped_refusals: int


async def ask(client: Client, load: OfferedLoad, rng: random.Random, began: float) -> LoadOutcome:
    at = time.monotonic()
    kind, retry_after = "whole", 0.0
    deadline = load.deadline_seconds
    try:
        await generate(client, load.prompt(rng), load.sampling, deadline_seconds=deadline)
    except Exhausted as error:
        kind, retry_after = "refused", error.retry_after_seconds
    except DeadlineExceeded:
        kind = "deadline"
    except FerrymanError as error:
        kind = error.reason
    return LoadOutcome(at - began, time.monotonic() - at, kind, retry_after)


async def closed_loop(client: Client, load: OfferedLoad, callers: int, seconds: float) -> float:
    """Requests a second with `callers` callers that send the next request at once."""
    began, ended = time.monotonic(), 0

    async def caller(number: int) -> None:
        nonlocal ended
        rng = random.Random(number)
        while time.monotonic() < began + seconds:
            outcome = await ask(client, load, rng, began)
            ended += outcome.kind == "whole" and began + outcome.arrived + outcome.seconds > 0

    async with asyncio.TaskGroup() as group:
        for number in range(callers):
            group.create_task(caller(number))
    return ended / (time.monotonic() - began)


async def open_loop(
    client: Client, load: OfferedLoad, rate: float, seconds: float, rng: random.Random
) -> list[LoadOutcome]:
    """Random arrivals, `rate` a second on average, which do not wait for earlier answers."""
    began = time.monotonic()
    asked: list[asyncio.Task[LoadOutcome]] = []
    at = 0.0
    async with asyncio.TaskGroup() as group:
        while (at := at + rng.expovariate(rate)) < seconds:
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            asked.append(group.create_task(ask(client, load, random.Random(rng.random()), began)))
    return [task.result() for task in asked]


def summary(
    name: str, rate: float, seconds: float, load: OfferedLoad, found: Sequence[LoadOutcome]
) -> LoadPhase:
    refused = [one for one in found if one.kind == "refused"]
    good = [one for one in found if one.kind == "whole" and one.seconds <= load.deadline_seconds]
    return LoadPhase(
        name,
        round(rate, 2),
        seconds,
        round(len(good) / seconds, 2),
        dict(Counter(one.kind for one in found)),
        round(max((one.seconds for one in found), default=0.0), 2),
        round(max((one.seconds for one in refused), default=0.0), 2),
        sum(not one.retry_after_seconds for one in refused),
    )


def recovery_seconds(found: Sequence[LoadOutcome]) -> float:
    """When, after the overload, the last request arrived that was not answered in time."""
    return max((one.arrived for one in found if one.kind != "whole"), default=0.0)


async def measure(cluster: Cluster, load: OfferedLoad, factor: float, seconds: float) -> bool:
    rng = random.Random(7)
    callers = 2 * (cluster.shape.max_running + RESERVED) * cluster.shape.num_decode
    async with Client(cluster.grpc, retries=NO_RETRIES) as client:
        await closed_loop(client, load, callers, 3.0)
        capacity = await closed_loop(client, load, callers, seconds / 2)
        print(f"capacity {capacity:.2f} requests/s", flush=True)
        phases = {"1x": 1.0, f"{factor:g}x": factor, "after": 0.5}
        found, outcomes = {}, {}
        for name, times in phases.items():
            rate = capacity * times
            outcomes[name] = await open_loop(client, load, rate, seconds, rng)
            found[name] = summary(name, rate, seconds, load, outcomes[name])
            print(json.dumps(asdict(found[name])), flush=True)
    ratio = found[f"{factor:g}x"].goodput / found["1x"].goodput
    recovered = recovery_seconds(outcomes["after"])
    print(f"goodput at {factor:g}x / at 1x: {ratio:.2f}; recovered after {recovered:.1f} s")
    late = max(phase.latest_end for phase in found.values()) - load.deadline_seconds
    untyped = sum(phase.untyped_refusals for phase in found.values())
    print(f"latest end after the deadline: {late:.2f} s; refusals without a time: {untyped}")
    return ratio >= 0.85 and recovered <= RECOVERY_SECONDS and late <= LATE_SECONDS and not untyped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--factor", type=float, default=5.0)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--deadline", type=float, default=6.0)
    parser.add_argument("--max-running", type=int, default=4)
    given = parser.parse_args()
    load = OfferedLoad(given.prompt_len, given.max_tokens, given.deadline)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        (folder / "cluster").mkdir()
        model = save_served_model(folder / "model", VARIANT)
        shape = ClusterShape(max_running=given.max_running, dtype="float32")
        with running_cluster(model, folder / "cluster", shape) as cluster:
            is_good = asyncio.run(measure(cluster, load, given.factor, given.seconds))
            cluster.assert_ledgers_balance()
    return 0 if is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
