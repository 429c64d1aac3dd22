"""Loading is shown as a bar on a terminal, as lines in a pipe, as events for a program."""

from __future__ import annotations

import io
import json

from rich.console import Console

from ferryman_cli.up_display import LoadBars, LoadEvents, LoadLines, load_display
from ferryman_launcher.readiness import CompileReport, WeightsReport, start_report

GB = 10**9


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def reports(stage: str = "weights") -> list[WeightsReport]:
    return [WeightsReport("llama", stage, part * GB // 100, GB) for part in range(101)]


def test_a_pipe_gets_a_line_at_each_tenth_of_a_stage() -> None:
    lines: list[str] = []
    display = LoadLines(lines.append)
    for report in [*reports("fingerprint"), *reports()]:
        display.show("decode", report)
    assert len(lines) == 20
    assert lines[0] == "decode loads llama (fingerprint): 100 of 1,000 MB"
    assert lines[-1] == "decode loads llama (weights): 1,000 of 1,000 MB"


def test_a_worker_that_is_started_again_is_shown_again() -> None:
    lines: list[str] = []
    display = LoadLines(lines.append)
    for _ in range(2):
        for report in reports():
            display.show("decode", report)
        display.close()
    assert len(lines) == 20


def test_a_model_without_weights_has_one_line() -> None:
    lines: list[str] = []
    LoadLines(lines.append).show("decode", WeightsReport("empty", "weights", 0, 0))
    assert lines == ["decode loads empty (weights): 0 of 0 MB"]


def test_a_program_gets_each_report_as_an_event_of_its_process() -> None:
    out = io.StringIO()
    display = LoadEvents(out)
    for report in reports():
        display.show("decode-2", report)
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    assert {event.pop("process") for event in events} == {"decode-2"}
    assert [start_report(json.dumps(event)) for event in events] == reports()


def test_a_terminal_gets_a_bar_for_each_worker_that_is_gone_at_the_end() -> None:
    out = Terminal()
    display = LoadBars(Console(file=out, force_terminal=True, width=100))
    for report in reports():
        for name in ("prefill", "decode"):
            display.show(name, report)
    display.close()
    drawn = out.getvalue()
    assert "prefill: llama (weights)" in drawn
    assert "decode: llama (weights)" in drawn
    ended = len(drawn)
    display.show("decode", reports()[0])
    assert len(out.getvalue()) == ended, "a bar that is closed draws no more"


def test_a_first_start_says_once_that_it_compiles() -> None:
    lines: list[str] = []
    display = LoadLines(lines.append)
    for name, loop in (("decode", "scan"), ("decode", "attend"), ("prefill", "scan")):
        display.show(name, CompileReport(loop))
    said = "compiles loops for this processor; later starts find them"
    assert lines == [f"decode {said}", f"prefill {said}"]
    out, terminal = io.StringIO(), Terminal()
    LoadEvents(out).show("decode", CompileReport("scan"))
    assert json.loads(out.getvalue()) == {"event": "compiling", "process": "decode", "loop": "scan"}
    bars = LoadBars(Console(file=terminal, force_terminal=True, width=120))
    for report in reports():
        bars.show("decode", report)
    bars.show("decode", CompileReport("scan"))
    bars.close()
    assert f"decode: {said}" in terminal.getvalue()


def test_the_display_is_chosen_by_where_it_goes() -> None:
    assert isinstance(load_display(Terminal(), print, as_json=False), LoadBars)
    assert isinstance(load_display(io.StringIO(), print, as_json=False), LoadLines)
    assert isinstance(load_display(Terminal(), print, as_json=True), LoadEvents)
