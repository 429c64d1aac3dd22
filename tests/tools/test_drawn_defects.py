"""Defects that a seed draws: which there are, what is never drawn, and how they are tried."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import dedent

import pytest
from tools.mutation.affinity import TestWords, words_of
from tools.mutation.drawn import UNREACHED, DrawnDefect, _labelled, examine_drawn
from tools.mutation.edits import Edit
from tools.mutation.forked_run import end_strays
from tools.mutation.generator import drawn, edits_of, optional_words
from tools.mutation.judgements import Judgement, read_judgements, table
from tools.mutation.operators import KINDS
from tools.mutation.planting import function_index, plant
from tools.mutation.reach import RoomReach, chosen_tests, digest, unnoted_tests

SOURCE = '''
import time


class Shelf:
    """Boxes."""

    async def turn(self, box, lid, size=1):
        if box is None:
            raise ValueError(f"no {self.name(box, lid)}")
        self.open(box, lid)
        await self.lock.acquire()
        try:
            if box.len < size:
                return Box(box.words[1:], depth=2, width=size)
        finally:
            self.lock.release()
'''
EVERY_KIND = {
    "check: f.py Shelf.turn: without `if box is None: "
    'raise ValueError(f"no {self.name(box, lid)}")`',
    "negated: f.py Shelf.turn: `box is None` is `(not (box is None))`",
    "call: f.py Shelf.turn: without `self.open(box, lid)`",
    "swapped: f.py Shelf.turn: `box, lid` is `lid, box`",
    "wait: f.py Shelf.turn: without `await self.lock.acquire()`",
    "negated: f.py Shelf.turn: `box.len < size` is `(not (box.len < size))`",
    "off by one: f.py Shelf.turn: `box.len < size` is `box.len <= size`",
    "off by one: f.py Shelf.turn: `1` is `(1) + 1`",
    "keyword: f.py Shelf.turn: without `depth=2,`",
    "release: f.py Shelf.turn: without `self.lock.release()`",
}
OPTIONAL = {"Box": frozenset({"depth"})}


def _names(source: str) -> set[str]:
    return {edit.name for edit in edits_of("f.py", dedent(source).encode(), OPTIONAL)}


def test_each_kind_of_mistake_is_found_where_it_can_be_made() -> None:
    assert _names(SOURCE) == EVERY_KIND
    assert {name.split(":")[0] for name in EVERY_KIND} == set(KINDS)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("log.info('x', a, b)", id="a log line"),
        pytest.param("raise ValueError(join(a, b))", id="a message"),
        pytest.param("assert near(a, b)", id="an invariant"),
        pytest.param("time.sleep(a)", id="a pause"),
        pytest.param("return a.deadline < b", id="the instant of a deadline"),
        pytest.param("return a[:40]", id="a length that is shown"),
        pytest.param("return a[:SHOWN_CHARS]", id="a named length that is shown"),
        pytest.param("return Box(width=a)", id="an argument that a call must have"),
        pytest.param("return Knife(name=a)", id="a name"),
    ],
)
def test_a_change_that_nobody_could_notice_is_not_drawn(body: str) -> None:
    assert _names(f"def f(a, b):\n    {body}\n") == set()


def test_texts_for_people_and_compiled_loops_are_not_drawn() -> None:
    for head in (
        "def __repr__(self, a, b):",
        "@njit\ndef f(a, b):",
        "@cpu.compiled()\ndef f(a, b):",
    ):
        assert _names(f"{head}\n    return g(a, b)\n") == set()


def test_one_seed_draws_the_same_again_with_kinds_in_turn() -> None:
    sources = {"f.py": SOURCE.encode()}
    first = drawn(sources, 8, 3, OPTIONAL)
    assert first == drawn(sources, 8, 3, OPTIONAL)
    assert sorted(edit.kind for edit in first) == sorted(KINDS)
    assert {edit.name for edit in first} != {edit.name for edit in drawn(sources, 8, 4, OPTIONAL)}


def test_code_that_is_added_moves_no_other_draw() -> None:
    more = {"g.py": b"def f(a, b):\n    a.take(b)\n"}
    few = {edit.name for edit in drawn({"f.py": SOURCE.encode()}, 8, 3, OPTIONAL)}
    many = {edit.name for edit in drawn({"f.py": SOURCE.encode()} | more, 8, 3, OPTIONAL)}
    assert len(few - many) <= 1


def test_what_is_drawn_keeps_the_lines_below_it_and_compiles() -> None:
    for edit in edits_of("f.py", SOURCE.encode(), OPTIONAL):
        planted = edit.planted_in(SOURCE)
        compile(planted, "f.py", "exec")
        assert planted.count("\n") == SOURCE.count("\n")
        assert planted != SOURCE


def test_a_text_that_has_changed_is_not_planted_in() -> None:
    edit = next(edits_of("f.py", SOURCE.encode(), OPTIONAL))
    with pytest.raises(ValueError, match="has changed since"):
        edit.planted_in(f"# a line\n{SOURCE}")


def test_a_word_is_optional_if_every_definition_of_the_name_has_a_default() -> None:
    one = b"def f(a, b=1, *, c, d=2): ...\nclass Box:\n    x: int\n    y: int = 1\n"
    words = optional_words([one, b"class Room:\n    def f(self, b=1, d=2, e=3): ...\n"])
    assert words["f"] == {"b", "d"}
    assert words["Box"] == {"y"}


def test_tests_behind_a_check_come_first_then_one_of_each_function() -> None:
    quick = {"a.py::f[1]": 1.0, "a.py::f[2]": 1.5, "a.py::g": 3.0}
    reached = quick | {"b.py::h": 9.0, "b.py::i": 2.0}
    in_order = [*sorted(quick, key=["a.py::f[1]", "a.py::g", "a.py::f[2]"].index)]
    assert chosen_tests(reached, {}, {}, 20.0) == [*in_order, "b.py::i", "b.py::h"]
    assert chosen_tests(reached, {"b.py::h": 9.0}, {}, 11.0) == ["b.py::h", "a.py::f[1]"]


def test_half_of_the_time_is_for_tests_that_speak_of_the_place() -> None:
    reached = {"a.py::f": 1.0, "a.py::g": 2.0, "b.py::h": 5.0, "b.py::i": 5.0}
    near = {"b.py::h": 2.0, "b.py::i": 1.0}
    assert chosen_tests(reached, {}, near, 10.0) == ["b.py::h", "a.py::f", "a.py::g"]


def test_a_rare_word_counts_more_and_most_in_the_test_itself(tmp_path: Path) -> None:
    tests = "def test_a():\n    order(adapter=1)\n\ndef test_b():\n    order()\n"
    (tmp_path / "a.py").write_text(tests)
    (tmp_path / "b.py").write_text("def test_c():\n    order()\n")
    names = ["a.py::test_a[x]", "a.py::test_b", "b.py::test_c"]
    affinities = TestWords(tmp_path).affinities(names, "prefill_order(adapter=asked.adapter)")
    assert sorted(names, key=affinities.__getitem__, reverse=True) == names
    assert words_of("RolePatience._num_tokens") == {"role", "patience", "tokens"}


def test_a_file_that_changed_since_the_notes_is_held_by_all_that_reach_it() -> None:
    noted = {"f.py": {1: 0b100, 2: 0b01, 3: 0b10}}
    reach = RoomReach(("one", "two"), (0.1, 0.2), noted, {"f.py": digest(b"text")})
    assert reach.reaching("f.py", [2], b"text") == {"one": 0.1}
    assert reach.reaching("f.py", [2], b"other") == {"one": 0.1, "two": 0.2}
    assert reach.is_run_by_imports("f.py", [1])
    assert not reach.is_run_by_imports("f.py", [2, 3])


TOYS = """
from functools import cache


def kept(function):
    def called(*words):
        return function(*words)

    return called


class Parent:
    def size(self):
        return 1


class Child(Parent):
    def size(self):
        return super().size() + 1


@kept
def doubled(number):
    return number * 2
"""


@pytest.fixture
def planted_toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A tree with the module `toys.box`; what planting does to this process is undone."""
    folder = tmp_path / "shared" / "toys"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "box.py").write_text(TOYS)
    monkeypatch.syspath_prepend(str(tmp_path / "shared"))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "shared"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    yield tmp_path
    for name in ("toys", "toys.box"):
        sys.modules.pop(name, None)


def _plant(tree: Path, old: str, new: str) -> str | None:
    source = TOYS.replace(old, new).encode()
    index = function_index(tree)
    return plant(tree, "shared/toys/box.py", source, index, tree / "links")


def test_functions_that_others_hold_get_the_planted_code(planted_toys: Path) -> None:
    import toys.box as box  # type: ignore[import-not-found]

    doubled = box.doubled
    assert _plant(planted_toys, "number * 2", "number * 3") is None
    assert doubled(2) == 6
    assert _plant(planted_toys, "size() + 1", "size() + 5") is None
    assert box.Child().size() == 6


def test_a_function_that_would_hold_other_variables_is_left_alone(planted_toys: Path) -> None:
    import toys.box as box

    assert _plant(planted_toys, "super().size() + 1", "7") is not None
    assert box.Child().size() == 2


def test_a_module_is_planted_before_it_is_imported_and_in_other_processes(
    planted_toys: Path,
) -> None:
    assert _plant(planted_toys, "number * 2", "number * 3") is None
    import toys.box as box

    assert box.doubled(2) == 6
    words = [sys.executable, "-c", "import toys.box as box; print(box.doubled(2))"]
    assert subprocess.check_output(words, text=True) == "6\n"


SUMS = """
import os, subprocess, sys, time


def total(numbers):
    result = 0
    for number in numbers:
        result += number
    return result


def ended(is_calm):
    if is_calm:
        return 1
    os._exit(3)


def awaited(is_there):
    while not is_there:
        time.sleep(0.1)


def counted(path):
    with open(path, "a") as file:
        file.write("x")
    return 1


TABLE = total([1, 2])
"""
SUMS_TESTS = """
import pathlib, subprocess, sys
import pytest
import sums

@pytest.fixture(scope="session")
def three():
    return [1, 2]

def test_total(three):
    assert sums.total(three) == 3

def test_total_of_a_process(three):
    words = [sys.executable, "-c", "import sums; print(sums.total([1, 2]))"]
    assert subprocess.check_output(words, text=True) == "3\\n"

def test_table():
    assert sums.TABLE == 3

def test_ended():
    assert sums.ended(True) == 1

def test_that_fails():
    assert sums.total([]) == 1

def test_awaited():
    sums.awaited(True)

def test_that_fails_now_and_then():
    seen = pathlib.Path(__file__).with_name("seen")
    sums.counted(seen)
    assert len(seen.read_text()) != 1
"""
PYPROJECT = """[tool.pytest.ini_options]
pythonpath = ["shared"]
markers = ["slow", "gpu", "compose"]
addopts = "--import-mode=importlib --disable-plugin-autoload -p _hypothesis_pytestplugin"
"""


@pytest.fixture(scope="module")
def sums_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sums")
    for name, text in {
        "shared/sums.py": SUMS,
        "tests/sums/test_sums.py": SUMS_TESTS,
        "pyproject.toml": PYPROJECT,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def _defect(old: str, new: str, tests: Sequence[str], is_apart: bool = False) -> DrawnDefect:
    start = SUMS.index(old)
    edit = Edit("call", "shared/sums.py", "f", start, start + len(old), old, new, 1, 1)
    names = {f"tests/sums/test_sums.py::{test}": 0.1 for test in tests}
    return DrawnDefect("router", f"{edit.name} {tests}", edit, ("sums",), names, is_apart)


def test_each_defect_ends_as_the_tests_that_reach_it_say(
    sums_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(sums_tree / "shared"))  # as an installed tree has it
    minus = ("+= number", "-= number")
    defects = {
        "seen by a test": _defect(*minus, ["test_total"]),
        "seen in a process": _defect(*minus, ["test_total_of_a_process"]),
        "ends the process": _defect("if is_calm", "if not is_calm", ["test_ended"]),
        "survives": _defect("return 1", "return True", ["test_ended"]),
        "is reached by no test": _defect(*minus, []),
        "fails without it too": _defect(*minus, ["test_that_fails", "test_ended"]),
        "fails now and then": _defect(*minus, ["test_that_fails_now_and_then"]),
        "runs with the import": _defect("total([1, 2])", "total([1])", ["test_table"], True),
    }
    judgements = {j.name: j for j in examine_drawn(list(defects.values()), sums_tree, 2, 60.0)}
    ends = {name: judgements[defect.name] for name, defect in defects.items()}
    survivors = {
        "survives", "is reached by no test", "fails without it too", "fails now and then"
    }  # fmt: skip
    assert {name for name, j in ends.items() if j.status == "survived"} == survivors
    assert {name for name, j in ends.items() if j.status == "caught"} == ends.keys() - survivors
    assert ends["is reached by no test"].detail == UNREACHED
    assert ends["fails without it too"].detail == "1 of 2 tests pass"
    assert "the process ended" in ends["ends the process"].detail
    assert (sums_tree / "shared/sums.py").read_text() == SUMS
    assert "| area router | 8 | 4 | 0 | 4 | 0 | 0 | 50% |" in table(judgements.values())


def test_a_test_hangs_if_it_passes_beside_itself_without_the_defect(
    sums_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAWN_PATIENCE", "1")
    defect = _defect("while not is_there", "while is_there", ["test_awaited"])
    (judgement,) = examine_drawn([defect], sums_tree, 1, 60.0)
    assert judgement.status == "hung"
    assert "times without the defect" in judgement.detail


def test_judgements_are_kept_as_they_come_and_the_last_of_each_counts(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert read_judgements(out) == {}
    for area, status in (("wire", "survived"), ("router", "hung"), ("wire", "caught")):
        Judgement(area, "call: a", status, "why", 3, 1.5).written_to(out)  # type: ignore[arg-type]
    kept = read_judgements(out)
    assert {key: judgement.status for key, judgement in kept.items()} == {
        ("wire", "call: a"): "caught",
        ("router", "call: a"): "hung",
    }
    assert kept["wire", "call: a"] == Judgement("wire", "call: a", "caught", "why", 3, 1.5)


def test_a_test_that_no_notes_know_is_found(sums_tree: Path) -> None:
    """It was written since, or failed when its room was noted: it may reach any line."""
    known = "tests/sums/test_sums.py::test_total"
    names = unnoted_tests({"sums": RoomReach((known,), (0.1,), {}, {})}, sums_tree)["sums"]
    assert "tests/sums/test_sums.py::test_ended" in names
    assert known not in names


def test_the_share_is_of_those_that_change_something() -> None:
    ends = ["caught", "caught", "hung", "survived", "equivalent"]
    listed = [Judgement("wire", f"wait: {i}", ends[i], "") for i in range(5)]  # type: ignore[arg-type]
    assert table(listed).splitlines()[2:] == [
        "| area wire | 5 | 2 | 1 | 1 | 0 | 1 | 75% |",
        "| kind wait | 5 | 2 | 1 | 1 | 0 | 1 | 75% |",
        "| all | 5 | 2 | 1 | 1 | 0 | 1 | 75% |",
    ]


def test_the_same_edit_twice_in_a_function_has_two_names() -> None:
    source = b"def f(a):\n    a.go()\n    b()\n    a.go()\n"
    edits = list(edits_of("f.py", source, OPTIONAL))
    first, other, last = sorted(_labelled(edits), key=lambda pair: pair[1].start)
    assert last[0] == f"{first[0]} [2]"
    assert other[0] == other[1].name


def test_what_a_fork_left_in_a_session_of_its_own_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    ) as stray:
        end_strays(str(tmp_path))
        assert stray.wait(60) == -signal.SIGKILL
