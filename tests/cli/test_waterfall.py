"""A recorded request, drawn."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from tests.cli.recorded import recorded_request

from ferryman.handoff.lifecycle import LifecycleEntry, check
from ferryman.handoff.waterfall import rows
from ferryman_cli.reports.waterfall import bar, facts_text
from ferryman_cli.trace import as_object, print_lives


def test_rows_come_in_the_order_of_their_time() -> None:
    drawn = rows(reversed(recorded_request("req-1")))
    assert [(row.event.role, row.event.name) for row in drawn] == [
        ("router", "received"),
        ("router", "routed"),
        ("prefill", "queued"),
        ("decode", "reserved"),
        ("prefill", "admitted"),
        ("prefill", "chunk"),
        ("decode", "verified"),
        ("prefill", "handed_off"),
        ("decode", "first_token"),
        ("decode", "finished"),
        ("router", "finished"),
    ]
    assert drawn[0].begin_ms == 0.0
    assert drawn[-1].begin_ms == 100.0


def test_a_bar_runs_to_the_next_event_of_the_same_process() -> None:
    spans = {
        (row.event.role, row.event.name): (row.begin_ms, row.end_ms)
        for row in rows(recorded_request("req-1"))
    }
    assert spans["router", "routed"] == (2.0, 100.0)
    assert spans["prefill", "admitted"] == (14.5, 20.0)
    assert spans["decode", "finished"] == (98.0, 98.0)


def test_attempts_of_a_worker_are_lines_of_their_own() -> None:
    first = LifecycleEntry("prefill", "prefill-00000001", 1, "r", 1, 1, "queued", {}, 1000, 0.0)
    again = LifecycleEntry("prefill", "prefill-00000001", 1, "r", 2, 2, "queued", {}, 1050, 50.0)
    assert [row.end_ms for row in rows([first, again])] == [0.0, 50.0]


@pytest.mark.parametrize(
    ("begin", "end", "drawn"),
    [
        pytest.param(0.0, 100.0, "████████", id="all of it"),
        pytest.param(25.0, 50.0, "  ██    ", id="a part"),
        pytest.param(50.0, 50.0, "    ▏   ", id="a point"),
        pytest.param(0.0, 6.25, "▌       ", id="half a cell"),
        pytest.param(100.0, 100.0, "       ▏", id="the last point"),
    ],
)
def test_bars(begin: float, end: float, drawn: str) -> None:
    assert bar(begin, end, 100.0, 8) == drawn


def test_every_bar_has_its_width() -> None:
    drawn = rows(recorded_request("r"))
    assert {len(bar(row.begin_ms, row.end_ms, 100.0, 17)) for row in drawn} == {17}
    assert bar(0.0, 0.0, 0.0, 5) == "▏    "


def test_the_table_shows_every_event_and_no_markup_of_its_facts() -> None:
    text = io.StringIO()
    events = recorded_request("req-[bold]1")
    print_lives(Console(file=text, width=160), events, is_verbose=True)
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("req-[bold]1: 3 tokens in 100 ms, the first after 36 ms")
    assert len([line for line in lines if "#1" in line]) == len(events)
    assert "tier=[red]host[/red]" in text.getvalue()


def test_facts_read_as_words() -> None:
    facts = {"a": 1.50, "cached": {"device": 32}, "span": [0, 64], "end": "stop"}
    assert facts_text(facts) == "a=1.5 cached=device:32 span=[0,64] end=stop"
    assert facts_text({"reason": "", "chain": "ab" * 90, "of": 0}) == f"chain={'ab' * 24}… of=0"


def test_the_object_is_json_and_says_what_is_illegal() -> None:
    events = [one for one in recorded_request("r") if one.name != "queued"]
    told = json.loads(json.dumps(as_object("r", events, check(events))))
    assert told["is_over"] is True
    assert len(told["events"]) == len(events)
    assert {found["rule"] for found in told["violations"]} >= {"illegal_order", "missing_seq"}
