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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.mutation.affinity import TestWords
from tools.mutation.areas import AREAS, sources_of
from tools.mutation.edits import Edit
from tools.mutation.examination import MutantStatus
from tools.mutation.generator import drawn, optional_words
from tools.mutation.operators import KINDS
from tools.mutation.reach import SELECTED, SOURCES, RoomReach, chosen_tests
from tools.mutation.tree_copy import TreeCopy

ROOT = Path(__file__).resolve().parents[2]
UNREACHED = "no test of these rooms reaches it"


@dataclass(frozen=True, slots=True)
class DrawnDefect:
    """An edit of an area, and the tests that are to catch it with their usual seconds.

    `rooms` are the folders of `tests` that hold them. `is_apart`: importing runs the line, so the
    defect needs a process that imports it anew.
    """

    area: str
    edit: Edit
    rooms: tuple[str, ...]
    tests: dict[str, float]
    is_apart: bool


@dataclass(frozen=True, slots=True)
class DrawnResult:
    """A drawn defect's status; `detail` names the test that failed, or says how many passed."""

    defect: DrawnDefect
    status: MutantStatus
    detail: str
    seconds: float = 0.0


def draw(
    areas: Sequence[str], number: int, seed: int, root: Path, notes: dict[str, RoomReach],
    budget: float,
) -> list[DrawnDefect]:  # fmt: skip
    """`number` defects, as many from each area, with their tests."""
    every = [path.read_bytes() for shelf in SOURCES for path in (root / shelf).rglob("*.py")]
    optional = optional_words(every)
    words, defects = TestWords(root), []
    for i, name in enumerate(areas):
        sources = sources_of(AREAS[name], root)
        share = number // len(areas) + (i < number % len(areas))
        rooms = [notes[room] for room in AREAS[name].rooms]
        defects += [
            _with_tests(name, edit, sources[edit.file], rooms, words, budget)
            for edit in drawn(sources, share, seed, optional)
        ]
    return defects


def _with_tests(
    area: str,
    edit: Edit,
    source: bytes,
    rooms: Sequence[RoomReach],
    words: TestWords,
    budget: float,
) -> DrawnDefect:
    lines = range(edit.first, edit.last + 1)
    reached: dict[str, float] = {}
    first: dict[str, float] = {}
    for room in rooms:
        reached |= room.reaching(edit.file, lines, source)
        first |= room.reaching(edit.file, edit.body, source)
    affinities = words.affinities(reached, f"{edit.old} {edit.function}")
    chosen = chosen_tests(reached, first, affinities, budget)
    is_apart = any(room.is_run_by_imports(edit.file, lines) for room in rooms)
    tests = {name: reached[name] for name in chosen}
    return DrawnDefect(area, edit, AREAS[area].rooms, tests, is_apart)


def examine_drawn(
    defects: Sequence[DrawnDefect], root: Path, jobs: int, seconds: float
) -> Iterator[DrawnResult]:
    """Yields the results as they come; `jobs` run at once. `seconds`: of a run apart."""
    warm = [d for d in defects if d.tests and not d.is_apart]
    apart = [d for d in defects if d.tests and d.is_apart]
    for defect in defects:
        if not defect.tests:
            yield DrawnResult(defect, "survived", UNREACHED)
    for result in _in_forks(warm, root, jobs) if warm else ():
        if result["status"] == "apart":
            apart.append(warm[result["index"]])
        else:
            yield DrawnResult(
                warm[result["index"]], result["status"], result["detail"], result["seconds"]
            )
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


def _examine_apart(defect: DrawnDefect, copy: TreeCopy, seconds: float) -> DrawnResult:
    """In a process that imports the planted text: slower, and true of all code."""
    tests = tuple(defect.tests)
    without = copy.run(tests, seconds)
    if not without.is_success:
        return DrawnResult(defect, "broken", f"fails without the defect: {without.detail}")
    began = time.monotonic()
    with copy.planted(defect.edit):
        run = copy.run(tests, seconds)
    took = time.monotonic() - began
    if run.is_success:
        return DrawnResult(defect, "survived", f"{len(tests)} tests pass", took)
    is_import = "Error" in run.detail and not run.is_failure
    status: MutantStatus = "caught" if run.is_failure or is_import else "broken"
    return DrawnResult(defect, status, run.detail, took)


def table(results: Sequence[DrawnResult]) -> str:
    """Lines of Markdown: each area and kind with what was drawn and caught."""
    lines = ["| | drawn | caught | survived | broken |", "|---|---|---|---|---|"]
    for title, names in (("area", AREAS), ("kind", KINDS)):
        for name in names:
            of_name = [r for r in results if name in (r.defect.area, r.defect.edit.kind)]
            counts = Counter(r.status for r in of_name)
            row = [str(counts[status]) for status in ("caught", "survived", "broken")]
            if of_name:
                lines.append(f"| {title} {name} | {len(of_name)} | {' | '.join(row)} |")
    return "\n".join(lines)
