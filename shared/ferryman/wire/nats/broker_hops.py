"""Reads the traces of nats-server: the stay of one message in one broker.

A broker says when the message came in and by which kind of connection, and for each way out whether
it was a stream, a subscription, or another broker, which writes a trace of its own.
Source: https://github.com/nats-io/nats-architecture-and-design/blob/main/adr/ADR-41.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

CONNECTIONS = ("client", "route", "gateway", "system", "leaf", "jetstream", "account")
"""The kinds of connections, by nats-server's numbers."""
_CLIENT = 0
_INGRESS, _STREAM, _EGRESS = "in", "js", "eg"


@dataclass(frozen=True, slots=True)
class BrokerHop:
    """One message in one broker. `arrived_by` is a kind of connection; `brokers` are those to which
    it went on, and `num_readers` the subscriptions that got it here. `seconds` passed from its
    arrival to the last of these; `errors` are the broker's words."""

    subject: str
    broker: str
    arrived_by: str
    unix_seconds: float
    seconds: float
    streams: tuple[str, ...]
    brokers: tuple[str, ...]
    num_readers: int
    errors: tuple[str, ...]


def hop_from_trace(payload: bytes) -> BrokerHop:
    """Raises ValueError for what is no trace of a message that came in."""
    try:
        raw = json.loads(payload)
        return _hop(str(raw["server"]["name"]), raw["events"])
    except (KeyError, IndexError, TypeError, RecursionError) as error:
        raise ValueError(f"a broker's trace lacks or spoils a field: {error!r}") from None


def _hop(broker: str, events: Sequence[Mapping[str, Any]]) -> BrokerHop:
    arrival, outward = _of_type(events, _INGRESS)[0], _of_type(events, _EGRESS)
    begin = _seconds_of(arrival["ts"])
    return BrokerHop(
        subject=str(arrival["subj"]),
        broker=broker,
        arrived_by=CONNECTIONS[int(arrival["kind"])],
        unix_seconds=begin,
        seconds=max(_seconds_of(event["ts"]) for event in events) - begin,
        streams=tuple(str(event["stream"]) for event in _of_type(events, _STREAM)),
        brokers=tuple(str(event.get("name", "")) for event in outward if event["kind"] != _CLIENT),
        num_readers=sum(event["kind"] == _CLIENT for event in outward),
        errors=tuple(str(event["error"]) for event in events if event.get("error")),
    )


def _of_type(events: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    return [event for event in events if event["type"] == kind]


def _seconds_of(text: object) -> float:
    """Seconds since 1970 of a time with up to nine digits behind the point."""
    whole, _, fraction = str(text).removesuffix("Z").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")
