"""The documents: links have targets, snippets import existing names, commands exist."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from ferryman.schedule.request import SamplingParams
from ferryman_cli.app import run

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#:]*)(#[^)]*)?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
SNIPPET = re.compile(r"```python\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"\.venv/bin/ferryman (\w+)")
README = (ROOT / "README.md").read_text()
TOUR = (ROOT / "docs" / "tour.md").read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for name, heading in LINK.findall(document.read_text()):
        target = document.parent / name if name else document
        assert target.exists(), name
        if heading:
            assert heading[1:] in _anchors(target), f"{name}{heading}"


def _anchors(document: Path) -> set[str]:
    """The names of headings in links: small letters, without marks, dashes for spaces."""
    headings = HEADING.findall(CODE.sub("", document.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_snippets_import_names_that_exist() -> None:
    snippets = SNIPPET.findall(README)
    assert len(snippets) == 2
    imports = [node for text in snippets for node in ast.walk(ast.parse(text))]
    for node in imports:
        if isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names)


def test_snippets_ask_for_sampling_that_is_valid() -> None:
    calls = [
        node
        for text in SNIPPET.findall(README)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "SamplingParams"
    ]
    assert calls
    for call in calls:
        given = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
        SamplingParams(**given)


@pytest.mark.parametrize("command", sorted(set(COMMAND.findall(README + TOUR))))
def test_commands_of_readme_and_tour_exist(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


def test_the_two_commands_stand_first() -> None:
    first = re.search(r"```sh\n(.*?)```", README, re.DOTALL)
    assert first is not None
    targets = [line.split("#")[0].strip() for line in first[1].splitlines()]
    assert targets == ["make up", "make test"]
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^up:", makefile, re.MULTILINE)
    assert re.search(r"^test:", makefile, re.MULTILINE)


def test_decisions_are_numbered_without_a_gap() -> None:
    found = sorted(path.name[:4] for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    assert found == [f"{number:04}" for number in range(1, len(found) + 1)]
