"""docs/defects.md: entries have an invariant and a test, and their numbers stand at the head."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "defects.md").read_text()
ENTRY = re.compile(r"^### (?:(\d+) )?(.+)$", re.MULTILINE)
HEAD, *SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)


def _numbers(text: str) -> list[int]:
    return [int(number) for number, _ in ENTRY.findall(text) if number]


def test_a_number_is_used_once() -> None:
    numbers = _numbers(PAGE)
    assert len(numbers) > 90, "the pattern finds the entries"
    assert [number for number, times in Counter(numbers).items() if times > 1] == []


def test_every_entry_has_an_invariant_and_a_test() -> None:
    entries = re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]
    lacking = [
        entry.splitlines()[0]
        for entry in entries
        if "\n- invariant: " not in entry or "\n- test: " not in entry
    ]
    assert lacking == []


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.splitlines()[0])
def test_the_list_of_families_has_the_numbers_of_each_section(section: str) -> None:
    title = section.splitlines()[0]
    family = re.search(
        rf"^- \[{re.escape(title)}\].*?\(([\d,\s]+)\)$", HEAD, re.MULTILINE | re.DOTALL
    )
    assert family is not None
    assert [int(number) for number in family[1].split(",")] == sorted(_numbers(section))


def test_no_row_of_a_table_is_left() -> None:
    assert [line for line in PAGE.splitlines() if line.startswith("| ")] == []
