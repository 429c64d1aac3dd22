"""A lifecycle log as a trace: JSON lines as `ferryman events --json` prints them.

`received` and `finished` carry a chain: a print of every `step`th page key, of the prompt or of
prompt and answer. Keys are chained, so two requests with the same print at the same place share
everything before it. Tokens after the deepest common print count as a request's own. `queued` has
the prompt's fork points.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from ferryman.handoff.chain_prints import decode_prints
from ferryman.handoff.lifecycle import DECODE, PREFILL, ROUTER, LifecycleEntry
from ferryman.runtime.lifecycle import decode_event
from ferryman_simulator.trace import (
    MAX_REQUESTS,
    MAX_TOKENS,
    BadTrace,
    MeasuredPace,
    SyntheticPrompt,
    Trace,
    TracedRequest,
    by_arrival,
    own,
)

Names = dict[int, bytes]
_Attempt = tuple[str, int, str]


@dataclass(slots=True)
class _RouterView:
    """The router's events of one request."""

    arrived_ms: int
    prompt_len: int
    names: Names
    output_len: int = 0
    fork_points: tuple[int, ...] = ()


@dataclass(slots=True)
class _EventLine:
    """The events of one worker about one attempt: (tokens since the event before, milliseconds)
    each."""

    points: list[tuple[int, float]] = field(default_factory=list)


def read_lifecycle(path: Path, lines: Iterable[tuple[int, str]], page_size: int) -> Trace:
    """The requests that ended well in the log in `path`. Raises BadTrace."""
    received: dict[str, _RouterView] = {}
    chunks: dict[_Attempt, _EventLine] = {}
    drawn: dict[_Attempt, _EventLine] = {}
    gaps_ms: list[float] = []
    for number, line in lines:
        event = _event(path, number, line)
        if event.role == PREFILL and event.name in ("admitted", "chunk"):
            _note_chunk(chunks, event)
        elif event.role == DECODE and event.name in ("first_token", "finished"):
            _note_draws(drawn, event)
        elif event.role == PREFILL and event.name == "queued" and event.request_id in received:
            received[event.request_id].fork_points = _forks(path, number, event)
        elif event.role == ROUTER and event.name == "received":
            received[event.request_id] = _received(path, number, event, page_size)
        elif event.role == ROUTER and event.name == "finished" and event.request_id in received:
            _finished(path, number, event, received[event.request_id], page_size)
            gaps_ms.append(_seconds(event.facts.get("itl_p50_ms")))
        if len(received) > MAX_REQUESTS:
            raise BadTrace(path, number, f"a trace has at most {MAX_REQUESTS} requests")
    if not received:
        raise BadTrace(path, 1, "no request was received in it")
    whole = {name: view for name, view in received.items() if view.output_len}
    # Without a worker's own events, what its clients saw is the best guess.
    step_seconds = _pace(drawn.values()) or _median(gaps_ms) / 1000
    pace = MeasuredPace(_pace(chunks.values()), step_seconds)
    return Trace(by_arrival(_requests(whole, page_size)), pace, len(received) - len(whole))


def _event(path: Path, number: int, line: str) -> LifecycleEntry:
    try:
        return decode_event(line.encode())
    except ValueError as error:
        raise BadTrace(path, number, str(error)) from None


def _received(path: Path, number: int, event: LifecycleEntry, page_size: int) -> _RouterView:
    prompt_len = max(1, _count(path, number, event, "tokens"))
    return _RouterView(event.unix_ms, prompt_len, _chain(path, number, event, page_size))


def _finished(
    path: Path, number: int, event: LifecycleEntry, view: _RouterView, page_size: int
) -> None:
    view.output_len = _count(path, number, event, "tokens")
    view.names |= _chain(path, number, event, page_size)


def _count(path: Path, number: int, event: LifecycleEntry, name: str) -> int:
    value = event.facts.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TOKENS:
        raise BadTrace(path, number, f"{name} should be a whole number up to {MAX_TOKENS}")
    return value


def _chain(path: Path, number: int, event: LifecycleEntry, page_size: int) -> Names:
    """Prints by the page they end; empty if no worker served the request or the event had no
    room."""
    if "chain" not in event.facts:
        return {}
    if event.facts.get("page_size") != page_size:
        tokens = event.facts.get("page_size")
        raise BadTrace(path, number, f"pages of {tokens} tokens; simulate it with --page-size")
    try:
        chain = decode_prints(str(event.facts["chain"]))
    except ValueError as error:
        raise BadTrace(path, number, str(error)) from None
    return {(index + 1) * chain.step: name for index, name in enumerate(chain.prints)}


def _requests(received: Mapping[str, _RouterView], page_size: int) -> Iterator[TracedRequest]:
    """Requests by arrival. A prefix known to be shared belongs to the earlier request."""
    contents: dict[tuple[int, bytes], SyntheticPrompt] = {}
    ordered = sorted(received.items(), key=lambda item: item[1].arrived_ms)
    for index, (request_id, view) in enumerate(ordered):
        total = view.prompt_len + view.output_len
        places = sorted(place for place in view.names.items() if place[0] * page_size <= total)
        deepest = max((place for place in places if place in contents), default=None)
        content = (
            contents[deepest].first(deepest[0] * page_size) if deepest else SyntheticPrompt((), ())
        )
        content = content.then(own(index, total - content.num_tokens))
        for place in places:
            contents.setdefault(place, content)
        forks = tuple(point for point in view.fork_points if point < view.prompt_len)
        yield TracedRequest(request_id, view.arrived_ms / 1000, content, view.prompt_len, forks)


def _forks(path: Path, number: int, event: LifecycleEntry) -> tuple[int, ...]:
    """Rising positions; none where the event had no room for them."""
    points = event.facts.get("forks", [])
    if not isinstance(points, list) or not all(_is_place(point) for point in points):
        raise BadTrace(path, number, f"forks should be whole numbers up to {MAX_TOKENS}")
    return tuple(sorted(set(points)))


def _is_place(value: object) -> bool:
    return type(value) is int and 0 < value <= MAX_TOKENS


# Times in the log.


def _note_draws(drawn: dict[_Attempt, _EventLine], event: LifecycleEntry) -> None:
    """The first token and the last one, as the worker says: clients get tokens in bunches."""
    key, tokens = _attempt_of(event), event.facts.get("tokens", 0)
    count = tokens - 1 if isinstance(tokens, int) and event.name == "finished" else 0
    drawn.setdefault(key, _EventLine()).points.append((count, event.elapsed_ms))


def _attempt_of(event: LifecycleEntry) -> _Attempt:
    return event.request_id, event.attempt, event.worker_id


def _note_chunk(chunks: dict[_Attempt, _EventLine], event: LifecycleEntry) -> None:
    key = _attempt_of(event)
    start, end = event.facts.get("start", 0), event.facts.get("end", 0)
    tokens = end - start if isinstance(start, int) and isinstance(end, int) else 0
    chunks.setdefault(key, _EventLine()).points.append((tokens, event.elapsed_ms))


def _pace(lines: Iterable[_EventLine]) -> float:
    """Seconds per token: the median over all pairs, because steps also serve other requests."""
    paces = [
        (after[1] - before[1]) / 1000 / after[0]
        for line in lines
        for before, after in pairwise(line.points)
        if after[0] > 0
    ]
    return _median(paces)


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _median(values: Iterable[float]) -> float:
    positive = [value for value in values if value > 0]
    return median(positive) if positive else 0.0
