"""Reports on a recorded conversation: nothing wider than the console, what matters first."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from ferryman.cache.manifest import Exactness
from ferryman.client import RouteCandidate, RouteExplanation
from ferryman.handoff.lifecycle import LifecycleEntry
from ferryman.wire.nats.heartbeat import StartBeat, StartPhase, beat_from_bytes
from ferryman_cli.reports.phrases import duration, reason_words, sentence
from ferryman_cli.reports.routes import route_summary
from ferryman_cli.reports.waterfall import event_line, print_summary
from ferryman_cli.top import Seen, fleet_table
from ferryman_cli.trace import print_lives

WIDTHS = (80, 120)
# `ferryman trace --json` of a cluster with the demo model: a conversation of two turns, and the
# second one again with another word in its system message.
TALKS = json.loads((Path(__file__).parent / "talks.json").read_text())


def recorded(name: str) -> list[LifecycleEntry]:
    known = {field.name for field in fields(LifecycleEntry)}
    return [
        LifecycleEntry(**{key: value for key, value in event.items() if key in known})
        for event in TALKS[name]["events"]
    ]


def traced(events: Sequence[LifecycleEntry], width: int, *, is_verbose: bool = False) -> list[str]:
    text = io.StringIO()
    console = Console(file=text, width=width, highlight=False)
    print_lives(console, events, is_verbose=is_verbose)
    return text.getvalue().splitlines()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("is_verbose", [False, True])
@pytest.mark.parametrize("name", TALKS)
def test_no_line_of_a_trace_is_wider_than_the_console(
    name: str, is_verbose: bool, width: int
) -> None:
    lines = traced(recorded(name), width, is_verbose=is_verbose)
    assert max(len(line) for line in lines) <= width
    assert not [line for line in lines if "…" in line and not is_verbose]


def test_a_trace_says_first_how_long_it_took_and_what_it_reused() -> None:
    headline, reused, computed, *_ = traced(recorded("talk-2"), 80)
    assert headline == "talk-2: 8 tokens in 70 ms, the first after 35 ms; ended by stop"
    assert reused.split() == "reused 240 of 263 prompt tokens (91%): 240 from the device".split()
    assert computed.split() == "computed 23 tokens: never seen before".split()


def test_a_trace_says_why_nothing_was_reused() -> None:
    text = " ".join(" ".join(traced(recorded("talk-3"), 120)).split())
    assert "reused nothing of 263 prompt tokens" in text
    assert (
        "computed 263 tokens: 144 (no recurrent state was kept there), 119 (never seen before)"
        in text
    )
    assert "parts from request talk-2 at token 146, in system[0]: 117 tokens after it" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_the_time_is_shown_by_phases_in_words(width: int) -> None:
    lines = traced(recorded("talk-2"), width)
    begin = next(index for index, line in enumerate(lines) if line.split()[:2] == ["at", "ms"])
    phases = [line.split(maxsplit=3) for line in lines[begin + 1 :]]
    words = [(role, rest.rstrip("█▉▊▋▌▍▎▏ ")) for _, _, role, rest in phases]
    assert words == [
        ("router", "chose workers"),
        ("prefill", "waited for its turn"),
        ("decode", "received the state"),
        ("prefill", "computed the prompt"),
        ("prefill", "sent the state"),
        ("decode", "waited for a step"),
        ("decode", "drew tokens"),
    ]
    took = {rest.rstrip("█▉▊▋▌▍▎▏ "): float(spent) for _, spent, _, rest in phases}
    assert took["computed the prompt"] == pytest.approx(7.2, abs=0.2)


def test_verbose_shows_every_event_with_all_its_facts() -> None:
    events = recorded("talk-2")
    text = " ".join(" ".join(traced(events, 80, is_verbose=True)).split())
    for event in events:
        assert event.name in text
        assert event.worker_id in text
    assert "uncached=never_seen:2" in text
    assert "itl_p99_ms=" in text


def test_a_request_that_failed_says_so_first() -> None:
    received, *_, last = recorded("talk-2")
    failed = replace(last, name="failed", facts={"reason": "NoWorker", "stage": "queued"})
    headline, *_ = traced([received, failed], 80)
    assert headline == "talk-2: failed after 70 ms, NoWorker"
    headline, *_ = traced(recorded("talk-2")[:-1], 80)
    assert headline == "talk-2: not over yet, 64 ms so far"


@pytest.mark.parametrize("width", WIDTHS)
def test_an_event_is_one_line(width: int) -> None:
    lines = [event_line(event, sentence(event), width) for event in recorded("talk-2")]
    assert max(len(line.plain) for line in lines) <= width
    text = "\n".join(line.plain for line in lines)
    assert "admitted    resumes at token 240 (240 from the" in text
    assert "chunk       computed tokens 240 to 262" in text


def candidate(prefill: str, seconds: float, kept: int = 0) -> RouteCandidate:
    return RouteCandidate(
        prefill_worker_id=prefill,
        decode_worker_id="decode-1",
        queue_seconds=0.0,
        load_seconds=0.0,
        prefill_seconds=seconds,
        handoff_seconds=0.002,
        total_seconds=seconds + 0.002,
        usable_tokens=kept,
        host_tokens=0,
        device_tokens=kept,
        plane="memory",
        exactness=Exactness.BITS,
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_an_explanation_says_by_how_much_the_choice_won(width: int) -> None:
    others = (candidate("prefill-2", 0.148), candidate("prefill-3", 0.2))
    route = RouteExplanation(1, candidate("prefill-1", 0.023, kept=240), others)
    text = io.StringIO()
    print_summary(Console(file=text, width=width), route_summary("talk-2", route))
    lines = text.getvalue().splitlines()
    assert lines[0] == "talk-2 went to prefill-1 and decode-1"
    assert max(map(len, lines)) <= width
    said = " ".join(text.getvalue().split())
    assert "because it is 125 ms quicker than the next of 2 others, prefill-2" in said
    assert "predicted 25 ms to the first token: computing 23 ms, hand-off 2.0 ms" in said
    assert "kept 240 tokens of its prompt: 240 from the device" in said


def beats() -> list[Seen]:
    path = Path(__file__).parent / "beats.json"
    return [
        Seen(beat_from_bytes(json.dumps(beat).encode()), 0.0)
        for beat in json.loads(path.read_text())
    ]


def fleet(width: int, *more: Seen) -> list[str]:
    text = io.StringIO()
    console = Console(file=text, width=width, highlight=False)
    console.print(fleet_table([*beats(), *more], 0.0, width))
    return text.getvalue().splitlines()


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (80, "worker state running queued tokens/s in use"),
        (120, "worker state running queued tokens/s in use free pages free states step ms drafts"),
    ],
)
def test_a_fleet_has_as_many_whole_columns_as_fit(width: int, columns: str) -> None:
    header, *lines = fleet(width)
    assert " ".join(header.split()) == columns
    assert max(len(line) for line in (header, *lines)) <= width
    assert len(lines) == len(beats()), "a line a worker"
    assert not [line for line in lines if "…" in line]
    assert {line.split()[0] for line in lines} == {seen.beat.worker_id for seen in beats()}


def test_with_room_a_fleet_has_every_column() -> None:
    header, *_ = fleet(400)
    assert header.split()[-3:] == ["tiers", "node", "address"]


def test_a_worker_that_starts_says_what_it_does_on_a_narrow_console() -> None:
    start = StartBeat("decode", "decode-00000000000000ff", 7, StartPhase.LOADING, 3, 4, 12.3)
    said = " ".join(" ".join(fleet(80, Seen(start, 0.0))).split())
    assert "loading" in said
    assert "75% done" in said
    assert max(map(len, fleet(80, Seen(start, 0.0)))) <= 80


def test_words_for_what_is_not_known_here_are_its_name() -> None:
    assert reason_words("a_later_reason") == "a later reason"
    assert [duration(ms) for ms in (0.42, 43.2, 2100, 61_000)] == [
        "0.4 ms",
        "43 ms",
        "2.1 s",
        "61 s",
    ]
    odd = LifecycleEntry("router", "router-1", 1, "r", 1, 1, "drained", {"usable_tokens": 3})
    assert isinstance(event_line(odd, sentence(odd), 80), Text)
