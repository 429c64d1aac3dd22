"""Gaps between tokens while a whole cluster is restarted: by hand, a minute or two.

    python -m tools.campaigns.rolling_restart --streams 16

`ferryman up` with two prefill and two decode workers and the demo model; streams that never pause.
First they run undisturbed for a while, then through `ferryman roll`. Printed are the gaps of both
parts, and the lifecycle log's seconds of each hand-off by a draining worker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ferryman.client import Client
from ferryman.handoff.lifecycle import LifecycleEntry
from ferryman.runtime.embedded import free_ports
from ferryman.runtime.lifecycle import decode_event
from ferryman.schedule.request import SamplingParams
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.nats_bus import nats_bus
from ferryman.wire.nats.subjects import Subjects
from ferryman.wire.public import TokenChunk

QUIET_SECONDS = 20.0
MAX_TOKENS = 1500
START_SECONDS = 180.0


@dataclass
class GapLog:
    """Seconds between the frames of all streams, by part; `failed` are the errors of requests."""

    part: str = "quiet"
    gaps: dict[str, list[float]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    answers: set[tuple[int, ...]] = field(default_factory=set)
    is_over: bool = False

    def add(self, seconds: float) -> None:
        self.gaps.setdefault(self.part, []).append(seconds)


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[str, str]]:
    """The gRPC address and the observer's URL of the broker of a cluster with its defaults."""
    http, grpc = free_ports(2)
    ports = ["--http-port", str(http), "--grpc-port", str(grpc)]
    size = ["--prefill", "2", "--decode", "2", "--state-dir", str(folder), "--json"]
    command = [sys.executable, "-m", "ferryman_cli", "up", *size, *ports]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        for _ in up.stdout:
            break
        known = json.loads((folder / "cluster.json").read_text())
        try:
            yield known["grpc"], (folder / "nats.url").read_text().strip()
        finally:
            up.terminate()
            up.wait()


async def stream(client: Client, log: GapLog) -> None:
    """The same greedy answer again and again."""
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    while not log.is_over:
        last: float | None = None
        tokens: list[int] = []
        try:
            async for event in client.generate("The red kite is in Oslo.", sampling):
                if isinstance(event, TokenChunk):
                    now = time.perf_counter()
                    if last is not None:
                        log.add(now - last)
                    last = now
                    tokens += event.token_ids
                if log.is_over:
                    return
        except Exception as error:  # whatever a client sees counts
            log.failed.append(repr(error))
        else:
            log.answers.add(tuple(tokens))


async def measured(folder: Path, grpc: str, num_streams: int) -> GapLog:
    """Gaps before the restart and during it."""
    log = GapLog()
    async with Client(grpc) as client:
        streams = [asyncio.create_task(stream(client, log)) for _ in range(num_streams)]
        await asyncio.sleep(QUIET_SECONDS)
        log.part = "roll"
        command = [sys.executable, "-m", "ferryman_cli", "roll", "--state-dir", str(folder)]
        rolling = await asyncio.create_subprocess_exec(*command)
        assert await rolling.wait() == 0
        log.is_over = True
        await asyncio.gather(*streams)
    return log


async def history(url: str, what: str) -> list[LifecycleEntry]:
    """All events of that kind."""
    async with nats_bus(NatsOptions(url, "campaign", log=None)) as bus:
        await bus.connected()
        said = await bus.history(f"{Subjects().root}.life.{what}", max_events=10_000)
    return [decode_event(one.payload) for one in said]


def hand_off_seconds(url: str) -> tuple[list[float], int]:
    """Of the requests that left a draining worker; and how many were computed again instead. A
    prompt that a draining prefill worker refused has another attempt too, and lost nothing."""
    moved = asyncio.run(history(url, "decode.*.*.handed_off"))
    queued, migrated = (
        {(event.request_id, event.attempt) for event in asyncio.run(history(url, what))}
        for what in ("prefill.*.*.queued", "router.*.*.migrated")
    )
    return [float(str(event.facts["seconds"])) for event in moved], len(queued & migrated)


def shown(name: str, seconds: list[float]) -> str:
    ordered = sorted(seconds)
    p50, p99 = statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))]
    values = ", ".join(f"{1000 * value:.1f}" for value in (p50, p99, ordered[-1]))
    return f"{name:14} {len(ordered):8}  p50, p99, longest: {values} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    num_streams = parser.parse_args().streams
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with cluster(folder) as (grpc, url):
            log = asyncio.run(measured(folder, grpc, num_streams))
            moved, num_again = hand_off_seconds(url)
    for part, gaps in log.gaps.items():
        print(shown(f"gaps, {part}", gaps))
    print(shown("hand-offs", moved))
    num_other = max(0, len(log.answers) - 1)
    print(f"failed: {len(log.failed)}; computed again: {num_again}; other answers: {num_other}")


if __name__ == "__main__":
    main()
