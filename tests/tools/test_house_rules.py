"""The house rules hold in this repository, and each of them can be broken."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from tools.house import ratchets
from tools.house.code import (
    LONG_LINES,
    pronoun_locals,
    timed_simple_queues,
    uncommented_functions,
)
from tools.house.modules import (
    MAX_MODULES,
    full_folders,
    import_circles,
    imports_of_developers,
    lonely_files,
    odd_module_names,
    repeated_classes,
)
from tools.house.sentences import MAX_COLUMNS, bare_openings, long_lines, relative_openings
from tools.house.source import EVERYWHERE, Module, parsed

# Functions of 25 lines and more without a comment, as many as there are. It may only fall.
MAX_UNCOMMENTED = 30


@pytest.fixture(scope="module")
def every() -> Sequence[Module]:
    return parsed(EVERYWHERE)


@pytest.fixture(scope="module")
def sources(every: Sequence[Module]) -> Sequence[Module]:
    return [module for module in every if module.is_source]


def test_a_class_name_occurs_once(every: Sequence[Module]) -> None:
    assert not repeated_classes(every)


def test_modules_are_named_by_nouns_of_the_field(sources: Sequence[Module]) -> None:
    assert not odd_module_names(sources)


def test_no_modules_import_each_other(sources: Sequence[Module]) -> None:
    assert not import_circles(sources)


def test_what_is_installed_imports_neither_tools_nor_tests(sources: Sequence[Module]) -> None:
    assert not imports_of_developers(sources)


def test_small_files_are_not_alone(sources: Sequence[Module]) -> None:
    assert not lonely_files(sources)


def test_long_functions_without_a_comment_become_fewer(sources: Sequence[Module]) -> None:
    assert len(uncommented_functions(sources)) <= MAX_UNCOMMENTED


def test_no_sentence_begins_with_a_relative_clause(every: Sequence[Module]) -> None:
    assert len(every) > 700, "the folders exist"
    assert not relative_openings(every)


def test_no_simple_queue_waits_with_a_timeout(sources: Sequence[Module]) -> None:
    assert not timed_simple_queues(sources)


def test_counted_exceptions_become_fewer(every: Sequence[Module]) -> None:
    """Numbers that have fallen may be copied from `python tools/house_rules.py --ratchets`."""
    today = ratchets.counted(every)
    assert today.keys() == ratchets.listed().keys() == ratchets.RULES.keys()
    assert not ratchets.breaches(today, ratchets.listed())


@pytest.mark.parametrize(
    ("text", "sentences"),
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
    text: str, sentences: list[str]
) -> None:
    module = _module("toy", text)
    expected = [f"services/toy/toy.py:{sentence}" for sentence in sentences]
    assert relative_openings([module]) == expected


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        pytest.param('"""Of a node. Sums."""', ["1 Of a node."], id="a docstring"),
        pytest.param('x = 1\n"""How many."""', ["2 How many."], id="an attribute"),
        pytest.param('"""As `sum`, but\nexact."""', ["1 As `sum`, but exact."], id="two lines"),
        pytest.param('"""\nThose of a node.\n"""', ["1 Those of a node."], id="a line below"),
        pytest.param('"""Sums. Of a node."""', [], id="a later sentence"),
        pytest.param('"""How many?"""', [], id="a question"),
        pytest.param('"""Ascending numbers."""', [], id="another word"),
        pytest.param('"""    Of = 1"""', [], id="a formula"),
        pytest.param('"""  """', [], id="an empty one"),
        pytest.param("x = 1  # Of a node.", [], id="a comment"),
    ],
)
def test_only_docstrings_that_begin_without_a_subject_are_listed(
    text: str, sentences: list[str]
) -> None:
    places = [place for _, place in bare_openings([_module("toy", text)])]
    assert places == [f"services/toy/toy.py:{sentence}" for sentence in sentences]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        pytest.param("def run(found, *one, said=1, **own): ...", "found one own said", id="args"),
        pytest.param("def run():\n    found = 1\n    found = 2\n", "found", id="set twice"),
        pytest.param("def run(found):\n    found = 2\n", "found", id="an argument set again"),
        pytest.param("def run():\n    for one, (own, x) in y: ...\n", "one own", id="a loop"),
        pytest.param("def run():\n    with x as known: ...\n", "known", id="a block"),
        pytest.param("def run():\n    if (told := x): ...\n", "told", id="a walrus"),
        pytest.param(
            "def run():\n    try: ...\n    except E as given: ...\n", "given", id="except"
        ),
        pytest.param(
            "def run():\n    match x:\n        case [*one] | {1: 2, **own} | x as shown: ...",
            "one own shown",
            id="match",
        ),
        pytest.param("x = [each for each in y for own in each]", "each own", id="comprehension"),
        pytest.param(
            "def run():\n    x = {each for each in y}, {each for each in z}\n",
            "each each",
            id="two comprehensions",
        ),
        pytest.param(
            "def run():\n    return [x for x in y if (own := x)]\n", "own", id="a walrus inside"
        ),
        pytest.param("x = lambda said: lambda told: 1", "said told", id="lambdas"),
        pytest.param(
            "def run():\n    one = 1\n    def step():\n        one = 2\n", "one one", id="nested"
        ),
        pytest.param(
            "def run():\n    class Run:\n        def step(self, own): ...\n", "own", id="a method"
        ),
        pytest.param("found = 1", "", id="a global"),
        pytest.param("class Run:\n    found: int = 1\n", "", id="a field"),
        pytest.param("def run():\n    x.found = y[found]\n", "", id="an attribute"),
        pytest.param("def found(): ...", "", id="a function"),
    ],
)
def test_every_local_named_by_a_pronoun_is_listed(text: str, names: str) -> None:
    places = [place for _, place in pronoun_locals([_module("toy", text)])]
    assert sorted(place.split()[1] for place in places) == names.split()


def test_a_folder_is_full_above_sixteen_modules() -> None:
    folder = [_module(f"m{number}", "") for number in range(MAX_MODULES)]
    folder.append(_module("__init__", ""))
    assert not full_folders(folder)
    folder.append(_module("further", ""))
    assert full_folders(folder) == {"services/toy": MAX_MODULES + 1}
    catalogue = [
        Module(Path("shared/ferryman/model/families") / module.path.name, module.name, "")
        for module in folder
    ]
    assert not full_folders(catalogue)


def test_long_lines_of_markdown_are_counted_but_for_hidden_folders(tmp_path: Path) -> None:
    line = "x" * MAX_COLUMNS
    text = f"{line}\n{line}x\n```\n{line}x\n```\n| {line} |\n{'é' * MAX_COLUMNS}\n"
    for folder in ("docs/decisions", ".venv/docs"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "page.md").write_text(text)
    (tmp_path / "README.md").write_text(f"{line}x\n")
    (tmp_path / "docs/short.md").write_text(line)
    assert long_lines(tmp_path) == {"README.md": 1, "docs/decisions/page.md": 3}


def test_a_number_above_the_list_and_an_idle_entry_are_breaches() -> None:
    def breaches(count: int, allowed: int) -> list[str]:
        rules: dict[str, dict[str, int]] = {rule: {} for rule in ratchets.RULES}
        counts = {"services/toy": count} if count else {}
        limits = {"services/toy": allowed} if allowed else {}
        return ratchets.breaches(rules | {"modules": counts}, rules | {"modules": limits})

    assert not breaches(17, 17)
    assert not breaches(17, 20), "it has fallen"
    assert [line.split(" (")[0] for line in breaches(21, 20)] == [
        "modules: services/toy has 21, and 20 are allowed"
    ]
    assert len(breaches(17, 0)) == 1, "a folder that is not listed"
    assert [line.split(" (")[0] for line in breaches(0, 17)] == [
        "modules: services/toy has none any more: take it out of ratchets.toml"
    ]


def test_the_numbers_are_printed_as_the_list_is_read(tmp_path: Path) -> None:
    text = 'def run(found):\n    """Of a node."""\n'
    toys = [_module(f"m{number}", text) for number in range(MAX_MODULES + 1)]
    core = Module(Path("shared/ferryman/cache/toy.py"), "ferryman.cache.toy", text)
    hub = Module(Path("shared/ferryman/hub.py"), "ferryman.hub", text)
    test = Module(Path("tests/toy/test_toy.py"), "tests.toy.test_toy", text)
    (tmp_path / "a page.md").write_text("x" * 161)
    today = ratchets.counted([*toys, core, hub, test], tmp_path)
    packages = {"toy": 17, "ferryman.cache": 1, "ferryman": 1}
    assert today == {
        "modules": {"services/toy": 17},
        "locals": packages,
        "openings": packages,
        "lines": {"a page.md": 1},
    }
    assert tomllib.loads(ratchets.written(today)) == today


def test_every_rule_finds_what_breaks_it() -> None:
    long = "def run() -> None:\n" + "    step()\n" * LONG_LINES
    modules = [
        _module("bringing", "class Run: ...\n"),
        _module("prefetch", f"from toy.bringing import Run as It\nclass Run: ...\n{long}"),
    ]
    assert list(repeated_classes(modules)) == ["Run"]
    assert odd_module_names(modules) == ["services/toy/bringing.py"]
    assert lonely_files(modules) == {"services/toy/bringing.py": "services/toy/prefetch.py"}
    assert len(uncommented_functions(modules)) == 1
    assert not import_circles(modules)
    modules.append(_module("first", "from toy.second import Second\n"))
    modules.append(_module("second", "from toy.first import First\n"))
    assert import_circles(modules) == ["toy.first", "toy.second"]
    assert not imports_of_developers(modules)
    modules.append(_module("contest", "def run() -> None:\n    from tools.bench import core\n"))
    assert imports_of_developers(modules) == ["services/toy/contest.py"]
    waits = "import queue\njobs = queue.SimpleQueue()\njobs.get(timeout=1)\n"
    assert timed_simple_queues([_module("queues", waits)]) == ["services/toy/queues.py:3"]
    assert not timed_simple_queues([_module("queues", waits.replace("Simple", ""))])
    commented = _module("prefetch", long.replace("step()", "step()  # why", 1))
    assert not uncommented_functions([commented])


def _module(name: str, text: str) -> Module:
    return Module(Path(f"services/toy/{name}.py"), f"toy.{name}", f"{text}\n")
