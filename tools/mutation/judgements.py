"""Judgements of drawn defects: a file of those that were tried, a line each, and a list of those
that change nothing.

A run that is interrupted goes on where it was, and survivors can be tried again.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tools.mutation.areas import AREAS
from tools.mutation.operators import KINDS

DrawnStatus = Literal["caught", "hung", "survived", "broken", "equivalent"]
EQUIVALENTS = Path(__file__).with_name("equivalent_draws.toml")
COLUMNS: tuple[DrawnStatus, ...] = ("caught", "hung", "survived", "broken", "equivalent")


@dataclass(frozen=True, slots=True)
class Judgement:
    """A drawn defect's status; `detail` names the test that failed, or says how many passed.

    `name` is its edit's, which begins with the kind. `line` is where it was then.
    """

    area: str
    name: str
    status: DrawnStatus
    detail: str
    line: int = 0
    seconds: float = 0.0

    @property
    def kind(self) -> str:
        return self.name.split(":", 1)[0]

    def written_to(self, path: Path) -> None:
        """Appends a line, which is in the file when this returns."""
        with path.open("a") as file:
            file.write(json.dumps(asdict(self)) + "\n")


def read_judgements(path: Path) -> dict[tuple[str, str], Judgement]:
    """The last judgement of each area and name; none if there is no such file."""
    lines = path.read_text().splitlines() if path.exists() else []
    judgements = [Judgement(**json.loads(line)) for line in lines]
    return {(judgement.area, judgement.name): judgement for judgement in judgements}


def read_equivalents(path: Path = EQUIVALENTS) -> Mapping[str, str]:
    """The names of edits that change nothing a caller can see → the reason, in a line."""
    listed = tomllib.loads(path.read_text())["equivalent"] if path.exists() else []
    return {entry["name"]: entry["reason"] for entry in listed}


def table(judgements: Iterable[Judgement]) -> str:
    """Lines of Markdown: each area and kind with what was drawn, and the share that is held.

    That is of those that are not equivalent.
    """
    listed = list(judgements)
    lines = [f"| | drawn | {' | '.join(COLUMNS)} | held |", "|---" * (len(COLUMNS) + 3) + "|"]
    for title, names in (("area", AREAS), ("kind", KINDS)):
        for name in names:
            lines += _row(f"{title} {name}", [j for j in listed if name in (j.area, j.kind)])
    return "\n".join([*lines, *_row("all", listed)])


def _row(title: str, judgements: list[Judgement]) -> list[str]:
    if not judgements:
        return []
    counts = Counter(judgement.status for judgement in judgements)
    told = len(judgements) - counts["equivalent"]
    share = (counts["caught"] + counts["hung"]) / told if told else 1.0
    cells = [str(counts[status]) for status in COLUMNS]
    return [f"| {title} | {len(judgements)} | {' | '.join(cells)} | {share:.0%} |"]
