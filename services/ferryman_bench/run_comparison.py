"""`ferryman bench compare`: two runs of one bench, row by row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from ferryman.errors import ConfigError
from ferryman_bench.hardware import check_same_processor
from ferryman_bench.report import figure, titled_table


def run_bench_compare(old: Path, new: Path, *, as_json: bool) -> int:
    """Prints, for each row that both files have, the new figure as a multiple of the old one.

    Raises ConfigError for files of two processors or two benches, and for those that no bench
    wrote.
    """
    before, after = _read(old), _read(new)
    check_same_processor(before["machine"], after["machine"])
    if before["title"] != after["title"]:
        raise ConfigError(f"the runs are of two benches: {before['title']!r}, {after['title']!r}")
    olds = {row["name"]: row["median"] for row in before["rows"]}
    rows = [(row, olds[row["name"]]) for row in after["rows"] if olds.get(row["name"])]
    if as_json:
        ratios = {row["name"]: row["median"] / earlier for row, earlier in rows}
        print(json.dumps({"machine": after["machine"], "new_by_old": ratios}))
        return 0
    table = titled_table(after["title"])
    for column in ("", "old", "new", "new / old"):
        table.add_column(column, justify="right" if column else "left")
    for row, earlier in rows:
        figures = (figure(earlier), f"{figure(row['median'])} {row['unit']}")
        table.add_row(row["name"], *figures, f"{row['median'] / earlier:.2f}")
    Console().print(table)
    return 0


def _read(file: Path) -> dict[str, Any]:
    try:
        result = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(result, dict) or not {"title", "machine", "rows"} <= result.keys():
        raise ConfigError(f"{file} has no result of a bench; make one with --json")
    return result
