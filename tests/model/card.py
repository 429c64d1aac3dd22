"""Writes the model card table: `python -m tests.model.card [configs a family]`."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.model.comparison import FAMILIES, TOLERANCES, Comparison, compare


def row(found: list[Comparison]) -> str:
    """One family: its architectures, kinds of state, and the largest differences seen."""
    names = ", ".join(sorted({each.architecture for each in found}))
    kinds = ", ".join(sorted({str(kind) for each in found for kind in each.kinds}))
    worst = [f"{max(each.differences[dtype] for each in found):.1e}" for dtype in TOLERANCES]
    return f"| {names} | {kinds} | {len(found)} | {' | '.join(worst)} |"


def main(num_configs: int) -> None:
    out = sys.stdout
    out.write(f"| family | state | configs | {' | '.join(TOLERANCES)} |\n|---|---|---|---|---|\n")
    for family in FAMILIES:
        found = []
        for seed in range(num_configs):
            with TemporaryDirectory() as folder:
                found.append(compare(family, seed, Path(folder)))
        out.write(row(found) + "\n")
        out.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
