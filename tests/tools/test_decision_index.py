"""Each decision says its topic and whether it holds, and the index says the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import decision_index

FIRST = "0001-pages-have-keys.md"
SECOND = "0002-keys-are-compared.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two records, of which the second amends the first."""
    (tmp_path / FIRST).write_text(
        "# 0001 Pages have keys\nTopic: State · Status: amended by 0002\n\n"
        f"Keys are compared, too ([0002]({SECOND})).\n"
    )
    (tmp_path / SECOND).write_text(
        f"# 0002 Keys are compared\nTopic: State · Status: holds\n\nAmends [0001]({FIRST}).\n"
    )
    return tmp_path


def test_the_index_is_what_the_records_say() -> None:
    page = decision_index.PAGE.read_text()
    records = decision_index.read_records()
    assert decision_index.written(records) == page, "run `python tools/decision_index.py`"


def test_every_record_is_in_the_index_once() -> None:
    records = decision_index.read_records()
    assert len(records) >= 120
    rows = [line for line in decision_index.PAGE.read_text().splitlines() if line[:3] == "| 0"]
    assert sorted(row[2:6] for row in rows) == [record.number for record in records]


def test_every_topic_has_records() -> None:
    topics = {record.topic for record in decision_index.read_records()}
    assert topics == set(decision_index.TOPICS)


def test_an_overtaken_record_says_what_holds_now() -> None:
    overtaken = [each for each in decision_index.read_records() if each.status == "overtaken"]
    assert overtaken
    silent = [each.file for each in overtaken if "**Note of 20" not in each.text]
    assert not silent


def test_a_record_that_was_amended_names_the_later_one(folder: Path) -> None:
    first, second = decision_index.read_records(folder)
    assert first.changed_by == ("0002",)
    assert second.changed_by == ()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "directly below its title"),
        ("Topic: Weather · Status: holds", "no topic 'Weather'"),
        ("Topic: State · Status: mostly holds", "no status 'mostly holds'"),
        ("Topic: State · Status: holds, but not on a card", "no status"),
        ("Topic: State · Status: amended by 0003", "no later record is 0003"),
        ("Topic: State · Status: amended by 0001", "no later record is 0001"),
        ("Topic: State · Status: taken back by", "no status"),
    ],
)
def test_a_line_that_says_something_else_is_refused(folder: Path, line: str, message: str) -> None:
    (folder / FIRST).write_text(f"# 0001 Pages have keys\n{line}\n")
    with pytest.raises(ValueError, match=message):
        decision_index.read_records(folder)


@pytest.mark.parametrize(("silent", "other"), [(FIRST, SECOND), (SECOND, FIRST)])
def test_a_change_without_a_link_is_refused(folder: Path, silent: str, other: str) -> None:
    record = folder / silent
    record.write_text(record.read_text().replace(f"]({other})", "]"))
    with pytest.raises(ValueError, match=f"{silent} should link to {other}"):
        decision_index.read_records(folder)


def test_a_title_with_another_number_is_refused(folder: Path) -> None:
    (folder / SECOND).write_text("# 0003 Keys are compared\nTopic: State · Status: holds\n")
    with pytest.raises(ValueError, match='should begin with "# 0002 "'):
        decision_index.read_records(folder)


def test_a_stale_status_is_noticed() -> None:
    page = decision_index.PAGE.read_text()
    stale = page.replace("| taken back by [0099] |", "| holds |")
    assert stale != page
    assert decision_index.written(decision_index.read_records()) != stale
