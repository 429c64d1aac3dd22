"""The figures of a part, read from its output: of one that ended, and of one that was ended."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping

Figures = Mapping[str, str]
TOTALS = re.compile(r"(\d+) (passed|failed|errors?|skipped)")
PROGRESS = re.compile(r"^([.FEsxX]+)(?: +\[ *\d+%\])?$", re.MULTILINE)
LETTERS = {".": "passed so far", "F": "failed so far", "E": "errors so far", "s": "skipped so far"}
ANSWER = re.compile(r"^(?!not reached)(.+): (.+)$")


def json_figures(output: str) -> Figures:
    """All objects that stand on a line of their own, together."""
    figures: dict[str, str] = {}
    for line in output.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            figures |= {str(name): str(text) for name, text in value.items()}
    return figures


def pytest_figures(output: str) -> Figures:
    """The counts in pytest's last line; without one, the tests that have ended so far."""
    for line in reversed(output.splitlines()):
        if totals := TOTALS.findall(line):
            return {what: count for count, what in totals}
    letters = Counter("".join(PROGRESS.findall(output)))
    return {what: str(letters[letter]) for letter, what in LETTERS.items() if letters[letter]}


def bits_figures(output: str) -> Figures:
    """How many questions were answered "equal", each other answer, and what was not reached."""
    answers: dict[str, str] = {}
    rest: dict[str, str] = {}
    for line in output.partition("equal tokens, equal bits")[0].splitlines():
        if answer := ANSWER.match(line):
            answers[answer[1]] = answer[2]
    for line in output.splitlines():
        if line.startswith("not reached: "):
            rest["not reached"] = line.partition(": ")[2]
    differing = {name: text for name, text in answers.items() if text != "equal"}
    if answers:
        equal = f"{len(answers) - len(differing)} of {len(answers)} equal"
        return {"rows of kernels and ways of models": equal, **differing, **rest}
    return rest
