"""The way of a request's lifecycle events through brokers, on the waterfall's scale of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from ferryman.handoff.lifecycle import LifecycleEntry
from ferryman.wire.nats.broker_hops import BrokerHop
from ferryman_cli.reports.waterfall import COLOURS

NOT_TRACED = (
    "the broker traced none of its events: BROKER_TRACES is off, or its traceparent not sampled"
)
_TIME, _ROLE, _EVENT, _BROKER = 9, 10, 13, 12


def hops_as_objects(
    events: Sequence[LifecycleEntry], hops: Sequence[BrokerHop]
) -> list[dict[str, object]]:
    """For programs, with milliseconds since the first event."""
    start = _start_ms(events)
    return [{"at_ms": round(hop.unix_seconds * 1e3 - start, 3), **asdict(hop)} for hop in hops]


def print_hops(
    console: Console, events: Sequence[LifecycleEntry], hops: Sequence[BrokerHop]
) -> None:
    """A line for each stay of an event in a broker; a long one is cut at the width."""
    if not hops:
        console.print(NOT_TRACED)
        return
    start = _start_ms(events)
    heading = f"{'at ms':>{_TIME}}{'took ms':>{_TIME}}  through the broker"
    console.print(Text(heading, "dim"))
    for hop in hops:
        *_, role, _, _, name = hop.subject.split(".")
        line = Text(f"{hop.unix_seconds * 1e3 - start:{_TIME}.1f}{hop.seconds * 1e3:{_TIME}.3f}  ")
        line.append(f"{role:<{_ROLE}}", COLOURS.get(role, "white")).append(f"{name:<{_EVENT}}")
        line.append(f"{_short(hop.broker):<{_BROKER}} {hop.arrived_by}: ")
        line.append(", ".join(_ways_out(hop)))
        console.print(line, no_wrap=True, overflow="ellipsis", crop=True)


def _short(broker: str) -> str:
    """A broker without a name of its own has a key of 56 characters for one."""
    return broker if len(broker) <= _BROKER else f"{broker[: _BROKER - 1]}…"


def _start_ms(events: Sequence[LifecycleEntry]) -> int:
    """The wall clock of the first event, from which the waterfall counts."""
    return min(event.unix_ms for event in events)


def _ways_out(hop: BrokerHop) -> Iterator[str]:
    yield from (f"stream {name}" for name in hop.streams)
    yield from (f"to {name}" for name in hop.brokers)
    if hop.num_readers:
        yield f"{hop.num_readers} subscription{'s' if hop.num_readers > 1 else ''}"
    yield from hop.errors
    if not (hop.streams or hop.brokers or hop.num_readers or hop.errors):
        yield "nobody listens"
