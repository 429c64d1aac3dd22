"""Writes the model card table: `python -m tests.model.card [configs a family]`."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.model.comparison import FAMILIES, TOLERANCES, Comparison, compare


def row(found: list[Comparison]) -> str:
    """One family: its architectures, kinds of state, and the largest differences seen.

    The last column is the share of positions compared in float32: all with clear choices.
    """
    names = ", ".join(sorted({each.architecture for each in found}))
    kinds = ", ".join(sorted({str(kind) for each in found for kind in each.kinds}))
    worst = [f"{max(each.differences[dtype] for each in found):.1e}" for dtype in TOLERANCES]
    compared = sum(each.shares["float32"] for each in found) / len(found)
    return f"| {names} | {kinds} | {len(found)} | {' | '.join(worst)} | {compared:.0%} |"


def main(num_configs: int) -> None:
    out = sys.stdout
    dtypes = " | ".join(TOLERANCES)
    out.write(f"| family | state | configs | {dtypes} | compared in float32 |\n{'|---' * 6}|\n")
    for family in FAMILIES:
        found = []
        for seed in range(num_configs):
            with TemporaryDirectory() as folder:
                found.append(compare(family, seed, Path(folder)))
        out.write(row(found) + "\n")
        out.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
