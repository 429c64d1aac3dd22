"""The tool that plants defects: which mutants count as caught, and which files it leaves alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from tools.mutate import main
from tools.mutation.examination import MutantResult, examine_all, summary
from tools.mutation.mutants import Mutant, read_areas, why_not_plantable
from tools.mutation.tree_copy import TreeCopy

SUMS = '''"""Sums."""


def total(numbers):
    result = 0
    for number in numbers:
        result += number
    return result


def mean(numbers):
    return total(numbers) / len(numbers)
'''
TESTS = """import subprocess, sys
import sums


def test_total():
    assert sums.total([1, 2]) == 3


def test_total_of_a_process():
    words = [sys.executable, "-c", "import sums; print(sums.total([1, 2]))"]
    assert subprocess.check_output(words, text=True) == "3\\n"


def test_mean_of_one():
    assert sums.mean([4]) == 4


def test_that_fails():
    assert sums.total([1]) == 2
"""
PYPROJECT = """[tool.pytest.ini_options]
pythonpath = ["shared"]
addopts = "--disable-plugin-autoload -p _hypothesis_pytestplugin"
"""
PLUS, ZERO = "result += number", "result = 0"


def _mutant(name: str, old: str, new: str, test: str) -> Mutant:
    return Mutant("sums", name, "shared/sums.py", old, new, (f"tests/test_sums.py::{test}",))


MUTANTS = [
    _mutant("subtracts", PLUS, "result -= number", "test_total"),
    _mutant("subtracts in a process", PLUS, "result -= number", "test_total_of_a_process"),
    _mutant("does not divide", " / len(numbers)", "", "test_mean_of_one"),
    _mutant("is no Python", PLUS, "result +=", "test_total"),
    _mutant("is no word", PLUS, "result += nubmer", "test_total"),
    _mutant("cannot be imported", '"""Sums."""', "import summs", "test_total"),
    _mutant("stands in two places", "numbers", "values", "test_total"),
    _mutant("changes nothing", ZERO, ZERO, "test_total"),
    _mutant("has a test that fails anyway", ZERO, "result = 1", "test_that_fails"),
    _mutant("has a test that does not exist", ZERO, "result = 1", "test_nothing"),
]


def _write_tree(root: Path) -> Path:
    files = {
        "shared/sums.py": SUMS,
        "tests/test_sums.py": TESTS,
        "pyproject.toml": PYPROJECT,
        ".venv/pyvenv.cfg": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, MutantResult]:
    root = _write_tree(tmp_path_factory.mktemp("tree"))
    found = list(examine_all(MUTANTS, root, jobs=2, seconds=200))
    assert [result.mutant for result in found] == MUTANTS
    assert (root / "shared/sums.py").read_text() == SUMS
    assert {path.name for path in root.iterdir()} == {"shared", "tests", "pyproject.toml", ".venv"}
    return {result.mutant.name: result for result in found}


@pytest.mark.parametrize("name", ["subtracts", "subtracts in a process"])
def test_a_defect_that_fails_a_test_is_caught(
    results: Mapping[str, MutantResult], name: str
) -> None:
    assert results[name].status == "caught"
    assert "AssertionError" in results[name].detail or "assert" in results[name].detail


def test_a_defect_that_fails_no_test_survives_by_the_names_of_its_tests(
    results: Mapping[str, MutantResult],
) -> None:
    assert results["does not divide"].status == "survived"
    assert "test_mean_of_one" in results["does not divide"].detail


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("is no Python", "does not compile"),
        ("is no word", "NameError"),
        ("cannot be imported", "summs"),
        ("stands in two places", "occurs 5 times"),
        ("changes nothing", "are the same"),
        ("has a test that fails anyway", "fails without the defect"),
        ("has a test that does not exist", "fails without the defect"),
    ],
)
def test_a_failure_that_says_nothing_of_the_defect_is_broken(
    results: Mapping[str, MutantResult], name: str, words: str
) -> None:
    assert results[name].status == "broken"
    assert words in results[name].detail


def test_the_summary_counts_what_was_caught(results: Mapping[str, MutantResult]) -> None:
    found = summary(list(results.values()))
    assert found == "caught 2 of 10 (20%); 1 survived, 7 broken"


def test_tests_that_do_not_end_in_time_are_no_failure(tmp_path: Path) -> None:
    copy = TreeCopy(_write_tree(tmp_path / "tree"), tmp_path / "copy")
    run = copy.run(["tests/test_sums.py::test_total"], seconds=0.0)
    assert not run.is_success
    assert not run.is_failure
    assert run.detail == "no end after 0 s"


def test_a_copy_is_as_before_when_the_defect_is_taken_out(tmp_path: Path) -> None:
    tree = _write_tree(tmp_path / "tree")
    copied = tmp_path / "copy" / "shared" / "sums.py"
    copy = TreeCopy(tree, tmp_path / "copy")
    assert not (tmp_path / "copy" / ".venv").exists()
    before = copied.stat().st_mtime_ns
    with copy.planted(MUTANTS[0]):
        assert "result -= number" in copied.read_text()
    assert copied.read_text() == SUMS
    assert copied.stat().st_mtime_ns == before
    assert (tree / "shared" / "sums.py").read_text() == SUMS


WHOLE = 'name = "{}"\nfile = "shared/sums.py"\nold = "{}"\nnew = "b"\ntests = ["t"]\n'


def _write_list(root: Path, area: str, *entries: str) -> None:
    folder = root / "tools" / "mutants"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{area}.toml").write_text("".join(f"[[mutant]]\n{entry}" for entry in entries))


def test_areas_are_read_by_name(tmp_path: Path) -> None:
    _write_list(tmp_path, "one", WHOLE.format("first", "a"), WHOLE.format("second", "a"))
    _write_list(tmp_path, "two", WHOLE.format("third", "a"))
    folder = tmp_path / "tools" / "mutants"
    assert [m.name for m in read_areas(folder)] == ["first", "second", "third"]
    assert read_areas(folder, ["two"]) == [
        Mutant("two", "third", "shared/sums.py", "a", "b", ("t",))
    ]
    with pytest.raises(ValueError, match="no such area: three"):
        read_areas(folder, ["three"])


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        pytest.param([WHOLE.format("same", "a")] * 2, "2 mutants are named", id="twice"),
        pytest.param(['name = "half"\n'], "'half' is no whole entry", id="half"),
        pytest.param(
            [WHOLE.format("untested", "a").replace('["t"]', "[]")], "'untested'", id="no tests"
        ),
    ],
)
def test_a_list_with_a_wrong_entry_is_refused(
    tmp_path: Path, entries: list[str], words: str
) -> None:
    _write_list(tmp_path, "one", *entries)
    with pytest.raises(ValueError, match=words):
        read_areas(tmp_path / "tools" / "mutants")


def test_a_mutant_that_survives_or_breaks_fails_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = _write_tree(tmp_path)
    _write_list(root, "sums", WHOLE.format("absent", "no such text"))
    assert main(["--root", str(root), "--list"]) == 0
    assert "absent" in capsys.readouterr().out
    assert main(["--root", str(root), "--list", "--only", "another"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["--root", str(root)]) == 1
    assert "the old text occurs 0 times in shared/sums.py" in capsys.readouterr().out


ROOT = Path(__file__).resolve().parents[2]


def test_every_listed_mutant_can_be_planted() -> None:
    """The ordinary tests notice a list that no longer fits the code."""
    mutants = read_areas(ROOT / "tools" / "mutants")
    left_behind = {m.name: why for m in mutants if (why := why_not_plantable(m, ROOT))}
    assert left_behind == {}


def test_every_test_that_a_listed_mutant_names_exists() -> None:
    """A test that got another name would leave its mutants untried."""
    mutants = read_areas(ROOT / "tools" / "mutants")
    missing = [(m.name, test) for m in mutants for test in m.tests if not _exists(test)]
    assert missing == []


def _exists(test: str) -> bool:
    path, *names = test.partition("[")[0].split("::")
    file = ROOT / path
    return file.exists() and all(re.search(rf"\b{name}\b", file.read_text()) for name in names)
