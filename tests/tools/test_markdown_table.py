"""A table's lines stay short, and nothing of a long cell is lost."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from tools.markdown_table import MAX_LINE, WRAPPED_LINE, short_table

HEAD = ("name", "default", "meaning")
WORDS = st.lists(st.sampled_from(["pages", "of", "the", "state.", "slots;", "each"]), max_size=90)


def test_a_table_of_short_rows_has_no_list() -> None:
    lines = short_table(HEAD, [("`A`", "1", "Pages.")], long=2)
    assert lines == ["| name | default | meaning |", "| --- | --- | --- |", "| `A` | 1 | Pages. |"]


def test_a_long_cell_keeps_the_sentences_that_fit() -> None:
    first, second = "A state is saved.", "It is " + "long " * 30 + "to tell."
    lines = short_table(HEAD, [("`A`", "1", f"{first} {second}")], long=2)
    assert lines[2] == f"| `A` | 1 | {first} (below) |"
    assert " ".join(" ".join(lines[4:]).split()) == f"- `A`: {second}"


def test_a_long_sentence_stands_below_as_a_whole() -> None:
    sentence = "long " * 40 + "sentence."
    lines = short_table(HEAD, [("`A`", "1", sentence)], long=2)
    assert lines[2] == "| `A` | 1 | below |"
    assert " ".join(" ".join(lines[4:]).split()) == f"- `A`: {sentence}"


@given(WORDS)
def test_lines_are_short_and_every_word_is_there(words: list[str]) -> None:
    lines = short_table(HEAD, [("`A`", "1", " ".join(words))], long=2)
    assert all(len(line) <= MAX_LINE for line in lines)
    assert all(len(line) <= WRAPPED_LINE for line in lines[4:])
    written = re.findall(r"pages|of|the|state|slots|each", " ".join(lines))
    assert written == [word.strip(".;") for word in words]
