"""`ferryman top`: all workers, from their heartbeats, and the processes of `ferryman up` that are
down."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from time import monotonic

from rich.console import Console, Group, OverflowMethod
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ferryman.cache.manifest import Kind
from ferryman.errors import NotFound
from ferryman.wire.nats.heartbeat import HEARTBEAT_SECONDS, Beat, Heartbeat, StartBeat
from ferryman.wire.nats.subjects import Subjects
from ferryman_cli.endpoints import BrokerPlace
from ferryman_cli.lifecycle_reader import connected_bus, next_beat_or_start

ONCE_SECONDS = 2.0 * HEARTBEAT_SECONDS
LATE_SECONDS = 3.0 * HEARTBEAT_SECONDS
GONE_SECONDS = 30.0
_GAP = 2
_WORKERS = ("prefill", "decode", "both")
_WIDEST = 400  # with --verbose every column is there
# A console with less room lacks the last of them first.
_COLUMNS = (
    "worker",
    "state",
    "running",
    "queued",
    "tokens/s",
    "in use",
    "free pages",
    "free states",
    "step ms",
    "drafts",
    "queue tokens",
    "steps",
    "from tiers",
    "node",
    "address",
)
_TEXTS = frozenset({"worker", "state", "from tiers", "node", "address"})


@dataclass(frozen=True, slots=True)
class Seen:
    """The latest beat of a worker, and the time it came."""

    beat: Beat
    at: float


class SeenWorkers:
    """The workers that sent a beat lately, those that start among them."""

    def __init__(self) -> None:
        self._seen: dict[str, Seen] = {}

    def on_beat(self, beat: Beat, now: float) -> None:
        self._seen[beat.worker_id] = Seen(beat, now)

    def workers(self, now: float) -> list[Seen]:
        """The workers by role and id; those silent for too long are dropped."""
        self._seen = {
            k: worker for k, worker in self._seen.items() if now - worker.at < GONE_SECONDS
        }
        return sorted(
            self._seen.values(), key=lambda worker: (worker.beat.role, worker.beat.worker_id)
        )


DownProcesses = Callable[[], Mapping[str, str]]


def run_top(
    place: BrokerPlace, down: DownProcesses, *, once: bool, is_verbose: bool, as_json: bool
) -> int:
    """Shows the workers; `down` has the processes that ended, each with how it ended."""
    if once or as_json:
        return asyncio.run(_once(place, down, is_verbose=is_verbose, as_json=as_json))
    asyncio.run(_live(place, down))
    return 0


async def _once(place: BrokerPlace, down: DownProcesses, *, is_verbose: bool, as_json: bool) -> int:
    seen = SeenWorkers()
    try:
        async with asyncio.timeout(ONCE_SECONDS), aclosing(_beats(place)) as beats:
            async for beat in beats:
                seen.on_beat(beat, monotonic())
    except TimeoutError:
        pass
    workers = seen.workers(monotonic())
    ended = down()
    if not workers:
        text = f"no worker of cluster {place.cluster} was heard within {ONCE_SECONDS:g} s"
        raise NotFound("; ".join((text, *_down_lines(ended))))
    if as_json:
        print(
            json.dumps(
                {"workers": [asdict(worker.beat) for worker in workers], "down": dict(ended)}
            )
        )
    else:
        console = Console(highlight=False)
        width = _WIDEST if is_verbose else console.width
        console.print(fleet_view(workers, ended, monotonic(), width), width=width, crop=False)
    return 0


async def _live(place: BrokerPlace, down: DownProcesses) -> None:
    seen = SeenWorkers()
    async with aclosing(_beats(place)) as beats:
        with Live("waiting for heartbeats", auto_refresh=False, transient=True) as live:
            async for beat in beats:
                seen.on_beat(beat, monotonic())
                workers, now, width = seen.workers(monotonic()), monotonic(), live.console.width
                view = fleet_view(workers, down(), now, width)
                live.update(view, refresh=True)


async def _beats(place: BrokerPlace) -> AsyncGenerator[Beat, None]:
    async with connected_bus(place) as bus:
        async with bus.subscribed(Subjects(place.cluster).all_beats) as messages:
            while True:
                yield await next_beat_or_start(messages)


def fleet_view(workers: Sequence[Seen], down: Mapping[str, str], now: float, width: int) -> Group:
    """The table of workers in so many characters, and below it a line for each that runs fewer
    requests at once than were asked for, and for each process that is down."""
    lines = [*_limit_lines(worker.beat for worker in workers), *_down_lines(down)]
    return Group(fleet_table(workers, now, width), *map(Text, lines))


def _limit_lines(beats: Iterable[Beat]) -> list[str]:
    limits = ((beat.worker_id, beat.limit) for beat in beats if isinstance(beat, Heartbeat))
    return [f"{worker_id}: {limit}" for worker_id, limit in limits if limit]


def _down_lines(down: Mapping[str, str]) -> list[str]:
    return [f"{name} is down: {reason}" for name, reason in down.items()]


def fleet_table(workers: Sequence[Seen], now: float, width: int) -> Table:
    """A table with one line a worker, and as many columns as fit: none is cut."""
    rows = [_cells(worker.beat, now - worker.at) for worker in workers]
    table, left = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0)), width
    names: list[str] = []
    for name in _COLUMNS:
        size = max([len(name), *(len(row.get(name, "-")) for row in rows)]) + _GAP
        # Names of workers and their state are always there, if need be on several lines.
        if size > left and len(names) >= 2:
            break
        names, left = [*names, name], left - size
    for name in names:
        is_text = name in _TEXTS
        overflow: OverflowMethod = "fold" if is_text else "ellipsis"
        table.add_column(
            name, justify="left" if is_text else "right", no_wrap=not is_text, overflow=overflow
        )
    for row in rows:
        table.add_row(*(row.get(name, "-") for name in names))
    return table


def _cells(beat: Beat, silent_seconds: float) -> dict[str, str]:
    """The cells of a worker by column; one without a value is left out."""
    is_late = silent_seconds > LATE_SECONDS
    silence = f"silent {silent_seconds:.0f} s"
    if isinstance(beat, StartBeat):
        state = silence if is_late else f"starts for {beat.seconds:.0f} s: {beat.doing}"
        return {"worker": beat.worker_id, "state": state}
    cells = {
        "worker": beat.worker_id,
        "state": silence if is_late else _state(beat),
        "running": f"{beat.num_running}/{beat.max_running}",
        "queued": str(beat.num_queued),
        "tokens/s": f"{1 / beat.seconds_per_token:.0f}" if beat.seconds_per_token else "",
        "in use": f"{beat.cache_usage:.0%}" if beat.role in _WORKERS else "",
        "free pages": str(beat.free_slots.get(Kind.FULL, "")),
        "free states": str(beat.free_slots.get(Kind.RECURRENT, "")),
        "step ms": f"{beat.step_seconds * 1000:.2f}" if beat.step_seconds else "",
        "drafts": _drafts(beat),
        "queue tokens": str(beat.queue_tokens),
        "steps": str(beat.num_steps),
        "from tiers": _speeds(beat),
        "node": beat.node,
        "address": beat.address,
    }
    return {name: cell for name, cell in cells.items() if cell}


def _state(beat: Heartbeat) -> str:
    if not beat.is_ready:
        return "draining"
    return "quarantined" if beat.is_quarantined else "ready"


def _drafts(beat: Heartbeat) -> str:
    """The share of drafts accepted, and the steps per token."""
    if not beat.drafted_tokens:
        return ""
    tokens = beat.draft_steps + beat.accepted_tokens
    share = beat.accepted_tokens / beat.drafted_tokens
    return f"{share:.0%} {beat.draft_steps / tokens:.2f}/token"


def _speeds(beat: Heartbeat) -> str:
    """The speed of bytes: to a worker from its host tier, to a host-cache from other tiers."""
    tiers = {
        "host": beat.load_seconds_per_byte,
        "storage": beat.storage_seconds_per_byte,
        "peer": beat.peer_seconds_per_byte,
    }
    speeds = [f"{tier}:{1e-6 / seconds:.0f}MB/s" for tier, seconds in tiers.items() if seconds]
    return " ".join(speeds)
