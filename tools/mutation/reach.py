"""The tests that reach each line: collected once for each room of tests, and kept.

A room is run once under coverage, each test as a context of its own, and so are the processes that
it starts. The notes go to `.ferryman/reach/ROOM.json`; lines are sets of tests, as bits.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

SELECTED = "not slow and not gpu and not compose"
UNNOTED_SECONDS = 1.0  # a guess, for a test that is not noted
PHASE = re.compile(r" \((setup|call|teardown)\)$")
SOURCES = ("services", "shared", "kernels")


@dataclass(frozen=True, slots=True)
class RoomReach:
    """A room's tests with their seconds, and by file and line the set of those that reach it.

    Bit i stands for test i; the bit after the last test for "when modules are imported". `digests`
    are those of the files at that time.
    """

    tests: tuple[str, ...]
    seconds: tuple[float, ...]
    lines: Mapping[str, Mapping[int, int]]
    digests: Mapping[str, str]

    def reaching(self, file: str, lines: Iterable[int], source: bytes) -> dict[str, float]:
        """The tests that reach one of the lines, or the file if that has changed since."""
        of_file = self.lines.get(file, {})
        if self.digests.get(file) != digest(source):
            lines = of_file
        bits = 0
        for line in lines:
            bits |= of_file.get(line, 0)
        pairs = enumerate(zip(self.tests, self.seconds, strict=True))
        return {name: seconds for i, (name, seconds) in pairs if bits >> i & 1}

    def is_run_by_imports(self, file: str, lines: Iterable[int]) -> bool:
        of_file = self.lines.get(file, {})
        return any(of_file.get(line, 0) >> len(self.tests) & 1 for line in lines)


def digest(source: bytes) -> str:
    return blake2b(source, digest_size=8).hexdigest()


def reach_of(room: str, root: Path, is_new_wanted: bool, processes: int) -> RoomReach:
    """The kept notes of a room, or new ones: that runs its tests once. `room`: cache, wire, …"""
    kept = root / ".ferryman" / "reach" / f"{room}.json"
    if is_new_wanted or not kept.exists():
        with tempfile.TemporaryDirectory(prefix="reach-") as folder:
            _run(room, root, Path(folder), processes)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(_noted(Path(folder), root)))
    return _read(json.loads(kept.read_text()))


def unnoted_tests(notes: Mapping[str, RoomReach], root: Path) -> dict[str, set[str]]:
    """Room → its tests that its notes do not know: they were written since, or failed then.

    Any of them may reach any line.
    """
    tests = [f"tests/{room}" for room in notes]
    words = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", SELECTED, *tests]
    output = subprocess.run(words, cwd=root, stdout=subprocess.PIPE, text=True, check=False).stdout
    names = [line for line in output.splitlines() if "::" in line]
    return {
        room: {name for name in names if name.startswith(f"tests/{room}/")} - set(reach.tests)
        for room, reach in notes.items()
    }


def _run(room: str, root: Path, folder: Path, processes: int) -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-n", str(processes), "-m", SELECTED]
    plugin = ["--hypothesis-seed=0", "-p", "tools.mutation.reach_plugin", f"tests/{room}"]
    paths = [str(root), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {
        "REACH_NOTES": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    print(f"notes which lines tests/{room} reaches", file=sys.stderr, flush=True)
    subprocess.run([*words, *plugin], cwd=root, env=env, stdout=subprocess.DEVNULL, check=False)


def _noted(folder: Path, root: Path) -> dict[str, object]:
    """The notes of all processes of a run, as one object of JSON."""
    seconds: dict[str, float] = {}
    for path in folder.glob("seconds-*.json"):
        seconds |= json.loads(path.read_text())
    tests = sorted(seconds)
    bit = {name: 1 << i for i, name in enumerate(tests)} | {"": 1 << len(tests)}
    lines: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for path in folder.glob("data.*"):
        _add_contexts(path, root, bit, lines)
    return {
        "tests": tests,
        "seconds": [round(seconds[name], 4) for name in tests],
        "lines": {f: {n: hex(bits) for n, bits in of.items()} for f, of in lines.items()},
        "digests": {file: digest((root / file).read_bytes()) for file in lines},
    }


def _add_contexts(
    path: Path, root: Path, bit: Mapping[str, int], lines: dict[str, dict[int, int]]
) -> None:
    from coverage import CoverageData

    data = CoverageData(basename=str(path))
    data.read()
    for measured in data.measured_files():
        file = Path(measured)
        if not file.is_relative_to(root) or not file.exists():
            continue
        of_file = lines[str(file.relative_to(root))]
        for line, contexts in data.contexts_by_lineno(measured).items():
            for context in contexts:
                of_file[line] |= bit.get(PHASE.sub("", context), 0)


def _read(noted: dict[str, dict[str, dict[str, str]]]) -> RoomReach:
    lines = {
        file: {int(line): int(bits, 16) for line, bits in of.items()}
        for file, of in noted["lines"].items()
    }
    return RoomReach(tuple(noted["tests"]), tuple(noted["seconds"]), lines, noted["digests"])  # type: ignore[arg-type]


def chosen_tests(
    reached: Mapping[str, float],
    first: Mapping[str, float],
    affinities: Mapping[str, float],
    budget: float,
) -> list[str]:
    """The tests to run within `budget` seconds, those of one file together.

    Half of it is for those that speak most of the place. The others: tests that get into the
    `first` lines, then one case of each test function, then the quick before the slow.
    """
    rank: dict[str, int] = defaultdict(int)
    plain = {}
    for name, seconds in sorted(reached.items(), key=lambda pair: (pair[1], pair[0])):
        function = name.split("[", 1)[0]
        plain[name] = (name not in first, rank[function], seconds, name)
        rank[function] += 1
    near = sorted(plain, key=lambda name: (-affinities.get(name, 0.0), plain[name]))
    chosen = _within([name for name in near if affinities.get(name)], reached, budget / 2)
    left = budget - sum(reached[name] for name in chosen)
    others = sorted(plain.keys() - set(chosen), key=plain.__getitem__)
    return _by_file([*chosen, *_within(others, reached, left)])


def _within(names: Sequence[str], seconds: Mapping[str, float], budget: float) -> list[str]:
    """The names in their order whose seconds fit together into the budget."""
    chosen = []
    for name in names:
        if seconds[name] <= budget:
            budget -= seconds[name]
            chosen.append(name)
    return chosen


def _by_file(names: Sequence[str]) -> list[str]:
    """The names with those of one file together, files in the order of their first."""
    files: dict[str, list[str]] = defaultdict(list)
    for name in names:
        files[name.split("::", 1)[0]].append(name)
    return [name for of_file in files.values() for name in of_file]
