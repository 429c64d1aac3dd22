"""The pause of requests that leave a draining decode worker: by hand, a minute.

    python -m tools.campaigns.drain_gaps --streams 1 --rounds 6
    python -m tools.campaigns.drain_gaps --shape granite-100m --prompt-len 512

`ferryman up` with two decode workers; a round has the one that decodes drain, and waits until
another one is ready in its place. So no process starts while requests move. Printed are the gaps
between tokens of a stream that decodes undisturbed, those around its move, and what the lifecycle
log says of the time between.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from ferryman.client import Client
from ferryman.handoff.lifecycle import LifecycleEntry
from ferryman.ids import make_request_id
from ferryman.runtime.embedded import free_ports
from ferryman.runtime.lifecycle import decode_event
from ferryman.schedule.request import SamplingParams
from ferryman.wire.nats.heartbeat import DECODE
from ferryman.wire.nats.nats_bus import NatsBus
from ferryman.wire.nats.subjects import Subjects
from ferryman.wire.public import TokenChunk
from ferryman_bench.random_model import make_random_model, write_tokenizer
from ferryman_bench.shape import shape_named
from ferryman_cli.drain import OrderAccess, drain_order, hearing_beats, order_access
from ferryman_cli.lifecycle_reader import next_beat

NUM_DECODE = 2
SETTLE_SECONDS = 1.0
FAR = 60  # tokens of each stream before the order
# The steps of a move, from one event of a request to the next.
STAGES = ("detached", "migrated", "moving", "reserved", "verified", "handed_off")


@dataclass
class StreamLog:
    """When each token of one stream came."""

    name: str = field(default_factory=make_request_id)
    times: list[float] = field(default_factory=list)
    is_far: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, client: Client, load: Load, number: int) -> None:
        sampling = SamplingParams(max_tokens=load.max_tokens, temperature=0.0, ignore_eos=True)
        async for event in client.generate(load.prompt(number), sampling, request_id=self.name):
            if isinstance(event, TokenChunk):
                self.times += [time.perf_counter()] * len(event.token_ids)
                if len(self.times) >= FAR:
                    self.is_far.set()

    def gap_at(self, offset: int) -> float:
        """Seconds between the last token before `offset` and the first from there on."""
        return self.times[offset] - self.times[offset - 1]

    def quiet_gaps(self) -> list[float]:
        """Of the tokens before the order."""
        return [after - before for before, after in itertools.pairwise(self.times[10:FAR])]


@dataclass
class MoveLog:
    """Gaps of all rounds in ms: undisturbed, around a move, and between events of a move."""

    quiet: list[float] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    num_stayed: int = 0

    def add(self, stream: StreamLog, events: Sequence[LifecycleEntry]) -> None:
        self.quiet += [1000 * gap for gap in stream.quiet_gaps()]
        known = {event.name: event for event in events if event.name in STAGES}
        if not known.keys() >= set(STAGES):
            self.num_stayed += 1
            return
        # The first hand-off's events have the same names; later ones took their place above.
        self.moved.append(1000 * stream.gap_at(int(str(known["migrated"].facts["offset"]))))
        for before, after in itertools.pairwise(STAGES):
            passed = known[after].unix_ms - known[before].unix_ms
            self.stages.setdefault(after, []).append(passed)
        self.sizes.append(int(str(known["handed_off"].facts["bytes"])))
        self.paths.add(str(known["handed_off"].facts["path"]))

    def show(self) -> None:
        step = median(self.quiet)
        print(f"undisturbed    p50 {step:.2f} ms, {len(self.quiet)} gaps")
        print(
            f"around a move  p50 {median(self.moved):.2f} ms, least {min(self.moved):.2f}, longest"
            f" {max(self.moved):.2f}; {median(self.moved) / step:.1f} steps; {len(self.moved)}"
            f" moves of {median(self.sizes) / 1e6:.2f} MB by {', '.join(sorted(self.paths))},"
            f" {self.num_stayed} did not move"
        )
        for stage, passed in self.stages.items():
            print(f"  … to {stage:11} p50 {median(passed):.1f} ms, longest {max(passed):.1f}")


@contextmanager
def cluster(folder: Path, flags: Sequence[str]) -> Iterator[Mapping[str, str]]:
    """A cluster with two decode workers, as its `cluster.json` describes it."""
    http, grpc = free_ports(2)
    ports = ["--http-port", str(http), "--grpc-port", str(grpc)]
    size = ["--decode", str(NUM_DECODE), "--state-dir", str(folder), "--json"]
    command = [sys.executable, "-m", "ferryman_cli", "up", *size, *ports, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        up.stdout.readline()
        try:
            yield json.loads((folder / "cluster.json").read_text())
        finally:
            up.terminate()
            up.wait()


async def events_of(bus: NatsBus, name: str) -> list[LifecycleEntry]:
    """The log of a request, each attempt's events behind those of the one before it."""
    said = await bus.history(f"{Subjects().root}.life.*.*.{name}.>", max_events=1000)
    return sorted((decode_event(one.payload) for one in said), key=lambda event: event.attempt)


async def drain_once(access: OrderAccess, client: Client, load: Load, log: MoveLog) -> None:
    """One round: streams begin, the decode worker of the first one drains, and is replaced."""
    streams = [StreamLog() for _ in range(load.streams)]
    async with hearing_beats(access) as (bus, messages), asyncio.TaskGroup() as group:
        reading = [
            group.create_task(stream.read(client, load, number))
            for number, stream in enumerate(streams)
        ]
        for stream in streams:
            await stream.is_far.wait()
        began = await events_of(bus, streams[0].name)
        victim = next(event.worker_id for event in began if event.role == DECODE)
        await drain_order(access, victim).give(bus)
        await asyncio.wait(reading)
        for stream in streams:
            log.add(stream, await events_of(bus, stream.name))
        ready: set[str] = set()
        while len(ready) < NUM_DECODE:
            beat = await next_beat(messages)
            if beat.role == DECODE and beat.is_ready and beat.worker_id != victim:
                ready.add(beat.worker_id)


@dataclass(frozen=True, slots=True)
class Load:
    """So many streams, each with a prompt of its own."""

    streams: int
    prompt_len: int
    max_tokens: int

    def prompt(self, number: int) -> list[int]:
        # Of another beginning in each round, so that the taker has no page of it.
        salt = time.perf_counter_ns() % 97
        return [(7 * i + 3 * number + salt) % 120 + 3 for i in range(self.prompt_len)]


async def measured(state: Path, grpc: str, load: Load, rounds: int) -> MoveLog:
    """All rounds; the first one warms up and does not count."""
    access = order_access("", "", None, state)
    log = MoveLog()
    async with Client(grpc) as client:
        await drain_once(access, client, load, MoveLog())
        for _ in range(rounds):
            await asyncio.sleep(SETTLE_SECONDS)
            await drain_once(access, client, load, log)
    return log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=1500)
    parser.add_argument("up", nargs="*", help="further flags of `ferryman up`, behind --")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder, flags = Path(made), list(asked.up)
        if asked.shape:
            make_random_model(shape_named(asked.shape), "bfloat16", folder / "model")
            write_tokenizer(folder / "model")
            flags += ["--model", str(folder / "model")]
        load = Load(asked.streams, asked.prompt_len, asked.max_tokens)
        with cluster(folder / "state", flags) as known:
            log = asyncio.run(measured(folder / "state", known["grpc"], load, asked.rounds))
    log.show()


if __name__ == "__main__":
    main()
