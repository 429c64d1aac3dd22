"""A span as a value: a piece of work of one trace that has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ferryman.runtime.traces import TraceContext

AttributeValue = bool | int | float | str | Sequence[str] | Sequence[int] | Sequence[float]


class WorkKind(StrEnum):
    """The side of a call that a span stands for, by OpenTelemetry's names of span kinds."""

    INTERNAL = "INTERNAL"
    SERVER = "SERVER"
    CLIENT = "CLIENT"


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """A moment within a span."""

    name: str
    unix_ns: int
    attributes: Mapping[str, AttributeValue]


@dataclass(frozen=True, slots=True)
class Span:
    """Work from `begin_ns` to `end_ns`, in nanoseconds since 1970. An empty `parent_id` is that of
    a trace's first span; an empty `error` means that the work ended well."""

    context: TraceContext
    parent_id: str
    name: str
    kind: WorkKind
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, AttributeValue]
    events: tuple[SpanEvent, ...] = ()
    error: str = ""


def flattened(facts: Mapping[str, object], prefix: str) -> dict[str, AttributeValue]:
    """Facts of an event as attributes: `cached={"device": 16}` becomes `PREFIX.cached.device`.

    Empty texts, lists and tables say nothing and are left out.
    """
    attributes: dict[str, AttributeValue] = {}
    for name, fact in facts.items():
        match fact:
            case Mapping():
                attributes |= flattened(fact, f"{prefix}.{name}")
            case "" | [] | ():
                pass
            case bool() | int() | float() | str() | list() | tuple():
                attributes[f"{prefix}.{name}"] = fact
    return attributes
