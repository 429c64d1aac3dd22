"""The house rules hold in this repository, and each of them can be broken."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).parents[2]
# Functions of 25 lines and more without a comment, as many as there are. It may only fall.
MAX_UNCOMMENTED = 30


@pytest.fixture(scope="module")
def rules() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "house_rules", REPOSITORY / "tools/house_rules.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_class_name_occurs_once(rules: ModuleType) -> None:
    assert not rules.repeated_classes(rules.modules(rules.EVERYWHERE))


def test_modules_are_named_by_nouns_of_the_field(rules: ModuleType) -> None:
    assert not rules.odd_module_names(rules.modules(rules.SOURCES))


def test_no_modules_import_each_other(rules: ModuleType) -> None:
    assert not rules.import_circles(rules.modules(rules.SOURCES))


def test_small_files_are_not_alone(rules: ModuleType) -> None:
    assert not rules.lonely_files(rules.modules(rules.SOURCES))


def test_long_functions_without_a_comment_become_fewer(rules: ModuleType) -> None:
    assert len(rules.uncommented_functions(rules.modules(rules.SOURCES))) <= MAX_UNCOMMENTED


def test_no_sentence_begins_with_a_relative_clause(rules: ModuleType) -> None:
    every = list(rules.modules(rules.EVERYWHERE))
    assert len(every) > 700, "the folders exist"
    assert not rules.relative_openings(every)


def test_no_simple_queue_waits_with_a_timeout(rules: ModuleType) -> None:
    assert not rules.timed_simple_queues(rules.modules(rules.SOURCES))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param('"""What it does."""', ["1 What it does."], id="a docstring"),
        pytest.param('"""Starts. Whose each is."""', ["1 Whose each is."], id="a second sentence"),
        pytest.param('x = 1\n"""What `x` means."""', ["2 What `x` means."], id="an attribute"),
        pytest.param(
            "x = 1  # who waits, ends\n# Who waits, ends.", ["2 Who waits, ends."], id="#"
        ),
        pytest.param("# First line. Whoever\n# waits.", ["1 Whoever waits."], id="lines joined"),
        pytest.param("x = 1  # Which\ny = 2  # it is", [], id="two comments at code"),
        pytest.param('"""One.\n\nWhatever ends.\n"""', ["1 Whatever ends."], id="a paragraph"),
        pytest.param('"""What is served?"""', [], id="a question"),
        pytest.param('"""Says what it is, and who\nasks. It ends."""', [], id="inside a sentence"),
        pytest.param('"""Sums.\n\n    What it sums = 1\n"""', [], id="a formula"),
        pytest.param('"""Who | What"""', [], id="a heading"),
        pytest.param('"""Whole numbers."""', [], id="another word"),
        pytest.param('x = "What it says."', [], id="a string of the program"),
    ],
)
def test_only_sentences_that_begin_with_a_relative_clause_are_found(
    rules: ModuleType, text: str, found: list[str]
) -> None:
    module = rules.Module(Path("toy.py"), "toy", f"{text}\n")
    assert rules.relative_openings([module]) == [f"toy.py:{each}" for each in found]


def test_every_rule_finds_what_breaks_it(rules: ModuleType) -> None:
    def module(name: str, text: str) -> object:
        return rules.Module(Path(f"services/toy/{name}.py"), f"toy.{name}", text)

    long = "def run() -> None:\n" + "    step()\n" * rules.LONG_LINES
    found = [
        module("bringing", "class Run: ...\n"),
        module("prefetch", f"from toy.bringing import Run as It\nclass Run: ...\n{long}"),
    ]
    assert list(rules.repeated_classes(found)) == ["Run"]
    assert rules.odd_module_names(found) == ["services/toy/bringing.py"]
    assert rules.lonely_files(found) == {"services/toy/bringing.py": "services/toy/prefetch.py"}
    assert len(rules.uncommented_functions(found)) == 1
    assert not rules.import_circles(found)
    found.append(module("first", "from toy.second import Second\n"))
    found.append(module("second", "from toy.first import First\n"))
    assert rules.import_circles(found) == ["toy.first", "toy.second"]
    waits = "import queue\njobs = queue.SimpleQueue()\njobs.get(timeout=1)\n"
    assert rules.timed_simple_queues([module("queues", waits)]) == ["services/toy/queues.py:3"]
    assert not rules.timed_simple_queues([module("queues", waits.replace("Simple", ""))])
    commented = module("prefetch", long.replace("step()", "step()  # why", 1))
    assert not rules.uncommented_functions([commented])
