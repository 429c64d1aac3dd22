"""Requests as the web page shows them: a row in the list, and one request in full.

A row and the full view have numbers, names and positions. The few words at which a prompt parts
from an earlier one are shown to their owner alone: the observer sees numbers of all tenants, and
no content.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ferryman.handoff.lifecycle import LifecycleEntry, check, is_over
from ferryman.handoff.reuse_events import FetchedUnits, fetches, partings
from ferryman.handoff.waterfall import rows
from ferryman.text.located_prompt import NamedPlace
from ferryman.wire.public import Parting
from ferryman_router.doors.web.prompt_strip import handoff_pages, prompt_strip
from ferryman_router.request.request_history import past_routes, shown_route
from ferryman_router.request.request_rows import RequestRow
from ferryman_router.request.request_runner import RequestRunner

MAX_EVENTS = 400  # of a request; a longer one is shown without its middle
_NOT_SHOWN = ("chain",)  # for programs, which read it by `ferryman trace --json`


def row_object(row: RequestRow, *, begun_unix_ms: int, shows_tenant: bool) -> dict[str, Any]:
    """A row as the page reads it. `seconds` are 0 while the request is under way."""
    return {
        "id": row.request_id,
        "name": row.name,
        **({"tenant": row.tenant} if shows_tenant else {}),
        "begun_unix_ms": begun_unix_ms,
        "seconds": round(row.ended - row.arrived, 4) if row.ended else 0,
        "stage": row.stage,
        "attempt": row.attempt,
        "prompt_tokens": row.prompt_tokens,
        "answer_tokens": row.answer_tokens,
        "prefill": row.prefill,
        "decode": row.decode,
        "cached": dict(row.cached),
        "computed": dict(row.computed),
        "end": row.end,
        "exactness": row.exactness,
    }


def request_object(
    events: Sequence[LifecycleEntry],
    runner: RequestRunner | None,
    places: Sequence[NamedPlace],
    *,
    page_size: int,
    shows_words: bool,
) -> dict[str, Any]:
    """One request in full, by its events. A `runner` that is still known has all routes and the
    words at which its prompt parts; the log has the runner-up and the position."""
    events, left_out = _shortened(events)
    # Each part is read from the same events, so a request that is under way shows what there is.
    strip, handoff = prompt_strip(events, page_size), handoff_pages(events)
    if runner is not None:
        routes = [shown_route(attempt.explanation) for attempt in runner.attempts]
    else:
        routes = past_routes(events)
    lines = rows(events)
    return {
        "is_over": is_over(events),
        "events": [
            {
                "begin_ms": round(row.begin_ms, 3),
                "end_ms": round(row.end_ms, 3),
                "role": row.event.role,
                "worker": row.event.worker_id,
                "attempt": row.event.attempt,
                "name": row.event.name,
                "facts": _facts(row.event.facts),
            }
            for row in lines
        ],
        "events_left_out": left_out,
        "violations": [] if left_out else [asdict(broken) for broken in check(events)],
        "strip": asdict(strip) if strip is not None else None,
        "places": [{"position": place.position, "name": place.name} for place in places],
        "parting": _parting(events, runner, shows_words=shows_words),
        "routes": [asdict(route) for route in routes],
        "handoff": asdict(handoff) if handoff is not None else None,
        "fetched": [_fetched(units) for units in fetches(events)],
    }


def _shortened(events: Sequence[LifecycleEntry]) -> tuple[Sequence[LifecycleEntry], int]:
    """The first and the last events, and how many were left out between them."""
    too_many = max(0, len(events) - MAX_EVENTS)
    if not too_many:
        return events, 0
    half = MAX_EVENTS // 2
    return [*events[:half], *events[-half:]], too_many


def _parting(
    events: Sequence[LifecycleEntry], runner: RequestRunner | None, *, shows_words: bool
) -> dict[str, Any] | None:
    """The place at which the prompt parts from an earlier one; None if it does not."""
    if runner is not None and runner.asked.parting:
        return _parting_object(runner.asked.parting, shows_words=shows_words)
    for parted in partings(events):
        return {
            "at": parted.at,
            "missed": parted.missed_tokens,
            "place": parted.place,
            "from": parted.other,
        }
    return None


def _parting_object(parting: Parting, *, shows_words: bool) -> dict[str, Any]:
    words = {"before": parting.before, "ours": parting.ours, "theirs": parting.theirs}
    return {
        "at": parting.position,
        "missed": parting.missed_tokens,
        "place": parting.place,
        "from": parting.request_id,
        **(words if shows_words else {}),
    }


def _fetched(units: FetchedUnits) -> dict[str, Any]:
    where = {"origin": units.origin, "folder": units.folder}
    return {"worker": units.worker_id, "units": units.units, **where}


def _facts(facts: Mapping[str, object]) -> dict[str, object]:
    """Facts that a browser can read: JSON knows no infinity, and Python's does."""
    return {name: _finite(value) for name, value in facts.items() if name not in _NOT_SHOWN}


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list) else value
