"""Draws a request: a line a phase, or every event with its facts; nothing is wider than the
console.

A bar extends from its beginning to its end on one scale of time. Wall clocks place processes
relative to each other; within a process its own milliseconds count.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from ferryman.handoff.lifecycle import ROUTER, LifecycleEntry
from ferryman.handoff.waterfall import WaterfallRow
from ferryman.runtime.spans.span_rules import ATTEMPT, RULES, ends, phase_of
from ferryman_cli.reports.phrases import PHASES
from ferryman_cli.reports.request_summary import RequestSummary, summary_of

MIN_BAR_WIDTH, MAX_BAR_WIDTH = 10, 60
COLOURS = {"router": "cyan", "prefill": "green", "decode": "magenta", "hostcache": "yellow"}
_EIGHTHS = " ▏▎▍▌▋▊▉"
_FULL, _POINT = "█", "▏"
# A chain of page keys is for programs, which read it with --json.
_MAX_SHOWN = 48
_LABEL, _TIME, _ROLE, _WORDS = 10, 9, 10, 21


@dataclass(frozen=True, slots=True)
class RequestPhase:
    """A phase of one process, in milliseconds; `words` say what it was."""

    role: str
    attempt: int
    words: str
    begin_ms: float
    end_ms: float


def phases_of(timed: Sequence[tuple[float, LifecycleEntry]]) -> list[RequestPhase]:
    """The phases in order of their beginning. One that the log does not end lasts until its last
    event of that process. The router's attempts are left out: they are the sum of the others."""
    lines: dict[tuple[tuple[str, str, int], int], list[tuple[float, LifecycleEntry]]] = {}
    for at, event in timed:
        if event.role in RULES:
            attempt = 0 if event.role == ROUTER else event.attempt
            lines.setdefault((event.publisher, attempt), []).append((at, event))
    phases = [phase for line in lines.values() for phase in _phases(line)]
    return sorted(phases, key=lambda phase: (phase.begin_ms, phase.end_ms))


def _phases(line: Sequence[tuple[float, LifecycleEntry]]) -> list[RequestPhase]:
    made: list[RequestPhase] = []
    name, begun = "", 0.0
    for index, (at, event) in enumerate(line):
        phase = phase_of(event.role, event.name, event.facts)
        is_last = index == len(line) - 1
        if name and (phase or is_last or ends(event.role, event.name)):
            if name != ATTEMPT:
                words = PHASES.get(name, name)
                made.append(RequestPhase(event.role, event.attempt, words, begun, at))
            name = ""
        if phase:
            name, begun = phase, at
    return made


def print_request(console: Console, lines: Sequence[WaterfallRow], *, is_verbose: bool) -> None:
    """The summary, then the phases; or every event."""
    timed = [(row.begin_ms, row.event) for row in lines]
    print_summary(console, summary_of(timed))
    _print(console, Text())
    if is_verbose:
        _print_events(console, lines)
    else:
        _print_phases(console, phases_of(timed))


def print_summary(console: Console, summary: RequestSummary) -> None:
    """The headline, and a line for each label; a long text goes on below itself."""
    print_line(console, summary.headline, style="bold")
    for label, text in summary.lines:
        print_line(console, text, f"  {label:<{_LABEL}}")


def print_line(console: Console, text: str, label: str = "", style: str = "") -> None:
    """A text, wrapped at the width, with a label before its first line."""
    pieces = textwrap.wrap(text, max(20, console.width - len(label))) or [""]
    for index, piece in enumerate(pieces):
        begin = label if not index else " " * len(label)
        _print(console, Text(begin).append(piece, style or None))


def _print_phases(console: Console, phases: Sequence[RequestPhase]) -> None:
    if not phases:
        return
    start, end = phases[0].begin_ms, max(phase.end_ms for phase in phases)
    attempts = max(phase.attempt for phase in phases)
    fixed = 2 * _TIME + _ROLE + _WORDS + 4
    width = min(max(console.width - fixed, MIN_BAR_WIDTH), MAX_BAR_WIDTH)
    _print(console, Text(f"{'at ms':>{_TIME}}{'took':>{_TIME}}", "dim"))
    for phase in phases:
        role = phase.role + (f" #{phase.attempt}" if attempts > 1 else "")
        line = Text(f"{phase.begin_ms:{_TIME}.1f}{phase.end_ms - phase.begin_ms:{_TIME}.1f}  ")
        line.append(f"{_cut(role, _ROLE):<{_ROLE}}", COLOURS.get(phase.role, "white"))
        line.append(f"{phase.words:<{_WORDS}} ")
        drawn = bar(phase.begin_ms - start, phase.end_ms - start, end - start, width)
        _print(console, line.append(drawn.rstrip(), COLOURS.get(phase.role, "white")))


def _print_events(console: Console, lines: Sequence[WaterfallRow]) -> None:
    """Each event on a line of its own, with its facts in the lines below it."""
    start, end = lines[0].begin_ms, max(row.end_ms for row in lines)
    width = min(max(console.width // 5, MIN_BAR_WIDTH), MAX_BAR_WIDTH)
    for row in lines:
        event, colour = row.event, COLOURS.get(row.event.role, "white")
        line = Text(f"{row.begin_ms:{_TIME}.1f}  ")
        drawn = bar(row.begin_ms - start, row.end_ms - start, end - start, width)
        line.append(f"{drawn} ", colour).append(f"{event.name:<12} ", "bold")
        room = max(4, console.width - len(line.plain))
        line.append(_cut(f"{event.worker_id} #{event.attempt}", room), colour)
        _print(console, line)
        indent = " " * (_TIME + 2)
        for piece in textwrap.wrap(facts_text(event.facts), max(20, console.width - len(indent))):
            _print(console, Text(indent + piece, "dim"))


def _print(console: Console, line: Text) -> None:
    console.print(line, no_wrap=True, overflow="ellipsis", crop=True)


def bar(begin_ms: float, end_ms: float, total_ms: float, width: int) -> str:
    """`width` characters: blank, then the share of the whole; at least a point."""
    if total_ms <= 0:
        return _POINT.ljust(width)
    begin = min(int(begin_ms / total_ms * width), width - 1)
    eighths = round((end_ms - begin_ms) / total_ms * width * 8)
    whole, rest = divmod(min(eighths, (width - begin) * 8), 8)
    drawn = _FULL * whole + (_EIGHTHS[rest] if rest else "")
    return (" " * begin + (drawn or _POINT)).ljust(width)


def facts_text(facts: Mapping[str, object]) -> str:
    """`name=value name=value`; empty values are left out, and long ones are cut."""
    return " ".join(f"{name}={_shown(value)}" for name, value in facts.items() if value != "")


def event_line(event: LifecycleEntry, words: str, width: int) -> Text:
    """One line: milliseconds, worker, request, event, and what it says, cut at the width."""
    line = Text(f"{event.elapsed_ms:9.1f} ms  ")
    line.append(f"{event.role:<9} ", COLOURS.get(event.role, "white"))
    line.append(f"{event.request_id}#{event.attempt} ", "bold")
    line.append(f"{event.name:<11} ").append(words, "dim")
    line.truncate(width, overflow="ellipsis")
    return line


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{name}:{_shown(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return "[" + ",".join(_shown(inner) for inner in value) + "]"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
