"""Draws defects and says which of them the tests catch that reach their lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tools.mutation.affinity import TestWords
from tools.mutation.areas import AREAS, sources_of
from tools.mutation.edits import Edit
from tools.mutation.generator import drawn, optional_words
from tools.mutation.judgements import DrawnStatus, Judgement
from tools.mutation.reach import (
    SELECTED,
    SOURCES,
    UNNOTED_SECONDS,
    RoomReach,
    chosen_tests,
    unnoted_tests,
)
from tools.mutation.tree_copy import TreeCopy

ROOT = Path(__file__).resolve().parents[2]
UNREACHED = "no test of these rooms reaches it"


@dataclass(frozen=True, slots=True)
class DrawnDefect:
    """An edit of an area, and the tests that are to catch it with their usual seconds.

    `name` is the edit's, with a number if its function has that twice. `rooms` are the folders of
    `tests` that hold them. `is_apart`: importing runs the line, so the defect needs a process that
    imports it anew.
    """

    area: str
    name: str
    edit: Edit
    rooms: tuple[str, ...]
    tests: dict[str, float]
    is_apart: bool

    def judged(self, status: DrawnStatus, detail: str, seconds: float = 0.0) -> Judgement:
        words = " ".join(detail.split())
        return Judgement(self.area, self.name, status, words, self.edit.first, seconds)


def draw(
    areas: Sequence[str], number: int, seed: int, root: Path, notes: dict[str, RoomReach],
    budget: float,
) -> list[DrawnDefect]:  # fmt: skip
    """`number` defects, as many from each area, with their tests."""
    every = [path.read_bytes() for shelf in SOURCES for path in (root / shelf).rglob("*.py")]
    optional = optional_words(every)
    words, defects = TestWords(root), []
    unnoted = unnoted_tests(notes, root)
    for i, name in enumerate(areas):
        sources = sources_of(AREAS[name], root)
        share = number // len(areas) + (i < number % len(areas))
        rooms = [notes[room] for room in AREAS[name].rooms]
        others = {test for room in AREAS[name].rooms for test in unnoted[room]}
        extra = dict.fromkeys(sorted(others), UNNOTED_SECONDS)
        edits = drawn(sources, share, seed, optional)
        defects += [
            _with_tests(
                DrawnDefect(name, label, edit, AREAS[name].rooms, extra, False),
                rooms,
                sources[edit.file],
                words,
                budget,
            )
            for label, edit in _labelled(edits)
        ]
    return defects


def _labelled(edits: Sequence[Edit]) -> list[tuple[str, Edit]]:
    """Names that differ: the second of equal ones in the order of the text has `[2]`."""
    counts = Counter[str]()
    labels = {}
    for edit in sorted(edits, key=lambda edit: (edit.file, edit.start)):
        counts[edit.name] += 1
        number = counts[edit.name]
        labels[edit] = f"{edit.name} [{number}]" if number > 1 else edit.name
    return [(labels[edit], edit) for edit in edits]


def _with_tests(
    defect: DrawnDefect, rooms: Sequence[RoomReach], source: bytes, words: TestWords, budget: float
) -> DrawnDefect:
    """The defect with those of its tests that are chosen: it comes with the unnoted ones."""
    edit = defect.edit
    lines = range(edit.first, edit.last + 1)
    reached = dict(defect.tests)
    first: dict[str, float] = {}
    for room in rooms:
        reached |= room.reaching(edit.file, lines, source)
        first |= room.reaching(edit.file, edit.body, source)
    affinities = words.affinities(reached, f"{edit.old} {edit.function}")
    chosen = chosen_tests(reached, first, affinities, budget)
    is_apart = any(room.is_run_by_imports(edit.file, lines) for room in rooms)
    return replace(defect, tests={name: reached[name] for name in chosen}, is_apart=is_apart)


def examine_drawn(
    defects: Sequence[DrawnDefect], root: Path, jobs: int, seconds: float
) -> Iterator[Judgement]:
    """Yields the results as they come; `jobs` run at once. `seconds`: of a run apart."""
    warm = [d for d in defects if d.tests and not d.is_apart]
    apart = [d for d in defects if d.tests and d.is_apart]
    for defect in defects:
        if not defect.tests:
            yield defect.judged("survived", UNREACHED)
    for result in _in_forks(warm, root, jobs) if warm else ():
        if result["status"] == "apart":
            apart.append(warm[result["index"]])
        else:
            defect = warm[result["index"]]
            yield defect.judged(result["status"], result["detail"], result["seconds"])
    if apart:
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            copy = TreeCopy(root, Path(folder))
            for defect in apart:
                yield _examine_apart(defect, copy, seconds)


def _in_forks(defects: Sequence[DrawnDefect], root: Path, jobs: int) -> Iterator[dict[str, Any]]:
    """Results from one pytest process, which collects the rooms once and forks for each defect."""
    rooms = sorted({room for defect in defects for room in defect.rooms})
    tests = [f"tests/{room}" for room in rooms]
    plugin = ["-p", "tools.mutation.warm_plugin", "--hypothesis-seed=0", "-m", SELECTED]
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory(prefix="drawn-") as folder, os.fdopen(reading) as results:
        orders, log = Path(folder) / "orders.json", Path(folder) / "log"
        listed = [_order(i, defect, root) for i, defect in enumerate(defects)]
        orders.write_text(json.dumps({"jobs": jobs, "pipe": writing, "defects": listed}))
        paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = os.environ | {"DRAWN_ORDERS": str(orders), "PYTHONPATH": os.pathsep.join(paths)}
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-q", "-s", *plugin, *tests],
                cwd=root, env=env, stdout=output, stderr=output, pass_fds=[writing],
            )  # fmt: skip
        os.close(writing)
        try:
            for _ in defects:
                line = results.readline()
                if not line:
                    raise RuntimeError(f"the tests ended early:\n{log.read_text()[-3000:]}")
                yield json.loads(line)
        finally:
            process.terminate()
            process.wait()


def _order(index: int, defect: DrawnDefect, root: Path) -> dict[str, object]:
    edit = defect.edit
    source = edit.planted_in((root / edit.file).read_text())
    return {"index": index, "file": edit.file, "source": source, "tests": defect.tests}


def _examine_apart(defect: DrawnDefect, copy: TreeCopy, seconds: float) -> Judgement:
    """In a process that imports the planted text: slower, and true of all code."""
    tests = tuple(defect.tests)
    without = copy.run(tests, seconds)
    if not without.is_success:
        return defect.judged("broken", f"fails without the defect: {without.detail}")
    began = time.monotonic()
    with copy.planted(defect.edit):
        run = copy.run(tests, seconds)
    took = time.monotonic() - began
    if run.is_success:
        return defect.judged("survived", f"{len(tests)} tests pass", took)
    # The tests passed without it: a module that cannot be imported any more catches it, too.
    status: DrawnStatus = "hung" if run.detail.startswith("no end") else "caught"
    return defect.judged(status, run.detail, took)
