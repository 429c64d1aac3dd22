"""The index of docs/decisions, from the line below each record's title.

python tools/decision_index.py          writes docs/decisions/README.md

    # 0042 Large bodies are read by a process of their own
    Topic: Text and doors · Status: holds

A status is "holds", "overtaken", or names the records that came later: "amended by 0090, 0098",
"taken back by 0105". Both records link to each other, and the earlier one says what holds now.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "docs" / "decisions"
PAGE = FOLDER / "README.md"

TOPICS = (
    "State",
    "Exactness",
    "Schedule",
    "Hand-off and wire",
    "Failures",
    "Host and storage",
    "Router",
    "Text and doors",
    "Models",
    "Processor",
    "Card",
    "Security",
    "Running and tools",
)
UNCHANGED = ("holds", "overtaken")
CHANGED = ("amended by", "taken back by")

READ_FIRST = {
    "0020": "what keeps state, and how everything else follows from it",
    "0005": "how a state that every token overwrites is saved",
    "0004": "why a request draws the same tokens anywhere",
    "0031": "why cached state is never another prompt's",
    "0001": "how prefill and decode agree on a hand-off",
    "0003": "why no slot is written by two requests",
    "0017": "how a writer that must stop is stopped",
    "0014": "how bytes that were stored are trusted again",
    "0040": "where requests wait, and who is next",
    "0037": "what the death of a worker means for its requests",
}
HEAD = """\
# Decisions
Each record says what was chosen, what was refused and why, as of its day; the tables below say
whether it still holds. *Amended* is a record that later ones changed in part, *taken back* one that
a later one replaced, and *overtaken* one that code alone changed in part: a note at its end says
what holds now.

"""

_TITLE = re.compile(r"# (\d{4}) (.+)")
_LINE = re.compile(r"Topic: (.+) · Status: (.+)")
_CHANGE = re.compile(rf"({'|'.join(CHANGED)}) (\d{{4}}(?:, \d{{4}})*)")


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """One file of the folder. `changed_by` are the numbers of the records that its status names."""

    file: str
    number: str
    title: str
    topic: str
    status: str
    changed_by: tuple[str, ...]
    text: str


def read_record(path: Path) -> DecisionRecord:
    """Raises ValueError, naming the file, unless its first two lines are as above."""
    text = path.read_text()
    first, second, *_ = [*text.splitlines(), "", ""]
    title, line = _TITLE.fullmatch(first), _LINE.fullmatch(second)
    if title is None or title[1] != path.name[:4]:
        raise ValueError(f'{path.name} should begin with "# {path.name[:4]} " and its title')
    if line is None:
        raise ValueError(f'{path.name} needs "Topic: … · Status: …" directly below its title')
    topic, status = line.groups()
    if topic not in TOPICS:
        raise ValueError(f"{path.name}: no topic {topic!r}; the topics are {', '.join(TOPICS)}")
    changed_by: tuple[str, ...] = ()
    if status not in UNCHANGED:
        change = _CHANGE.fullmatch(status)
        if change is None:
            choices = ", ".join((*UNCHANGED, *(f"{verb} NNNN" for verb in CHANGED)))
            raise ValueError(f"{path.name}: no status {status!r}; the choices are {choices}")
        changed_by = tuple(change[2].split(", "))
    return DecisionRecord(path.name, title[1], title[2], topic, status, changed_by, text)


def read_records(folder: Path = FOLDER) -> list[DecisionRecord]:
    """All records, in order. Raises ValueError for one that is not as above, or whose status names
    a record that is missing or earlier, or if one of the two has no link to the other."""
    records = [read_record(path) for path in sorted(folder.glob("[0-9]*.md"))]
    by_number = {record.number: record for record in records}
    for record in records:
        for number in record.changed_by:
            _check_change(record, number, by_number)
    return records


def _check_change(
    record: DecisionRecord, number: str, by_number: Mapping[str, DecisionRecord]
) -> None:
    later = by_number.get(number)
    if later is None or number <= record.number:
        raise ValueError(f"{record.file} is {record.status}, but no later record is {number}")
    for one, other in ((later, record), (record, later)):
        if f"]({other.file})" not in one.text:
            raise ValueError(
                f"{later.file} changes {record.file}: {one.file} should link to {other.file}"
            )


def written(records: Sequence[DecisionRecord]) -> str:
    """The page: what to read first, a table for each topic, and the targets of its links."""
    by_number = {record.number: record for record in records}
    first = [
        f"{place}. [{by_number[number].title}][{number}]: {why}"
        for place, (number, why) in enumerate(READ_FIRST.items(), start=1)
    ]
    parts = ["Ten to read first:\n" + "".join(f"{line}\n" for line in first)]
    parts += [_section(topic, records) for topic in TOPICS]
    parts.append("".join(f"[{record.number}]: {record.file}\n" for record in records))
    return HEAD + "\n".join(parts)


def _section(topic: str, records: Sequence[DecisionRecord]) -> str:
    rows = [
        f"| {record.number} | [{record.title}][{record.number}] | {_linked_status(record)} |\n"
        for record in records
        if record.topic == topic
    ]
    return f"## {topic}\n| number | decision | status |\n|---|---|---|\n" + "".join(rows)


def _linked_status(record: DecisionRecord) -> str:
    return re.sub(r"\d{4}", lambda number: f"[{number[0]}]", record.status)


if __name__ == "__main__":
    PAGE.write_text(written(read_records()))
