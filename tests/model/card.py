"""Compares families with transformers and keeps their largest differences.

python -m tests.model.card                     every family
python -m tests.model.card gemma glm4          these alone; the others keep their figures

The figures are in tests/model/differences.json; `tools/model_tables.py` writes them into
docs/models.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.model.comparison import FAMILIES, TOLERANCES, Comparison, compare

NUM_CONFIGS = 12
FIGURES = Path(__file__).parent / "differences.json"


def figures(comparisons: Sequence[Comparison]) -> dict[str, float]:
    """The largest differences by dtype, and the share of positions compared in float32: those
    before the first unclear choice."""
    worst = {
        dtype: float(f"{max(comparison.differences[dtype] for comparison in comparisons):.1e}")
        for dtype in TOLERANCES
    }
    compared = sum(comparison.shares["float32"] for comparison in comparisons) / len(comparisons)
    return {"configs": len(comparisons), **worst, "compared": round(compared, 2)}


def measure(family: str) -> dict[str, float]:
    """Compares random configs of a family, each in a folder of its own."""
    comparisons = []
    for seed in range(NUM_CONFIGS):
        with TemporaryDirectory() as folder:
            comparisons.append(compare(family, seed, Path(folder)))
    return figures(comparisons)


def main(families: Sequence[str]) -> None:
    for family in families or FAMILIES:
        stored = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
        # Written after each family, so that a run may be cut into pieces.
        stored[family] = measure(family)
        lines = [f"  {json.dumps(name)}: {json.dumps(stored[name])}" for name in sorted(stored)]
        FIGURES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        sys.stdout.write(f"{family} {stored[family]}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
