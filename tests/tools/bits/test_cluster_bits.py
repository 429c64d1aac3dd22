"""A sample of the ways through a cluster: whichever led to an answer, it has the cold run's bits.

The whole table is made by hand (`python -m tools.bits cluster`); no cell of it is an exception.
"""

from __future__ import annotations

import pytest
from tools.bits.cluster.columns import served_cells
from tools.bits.cluster.ways import SERVED_WAYS
from tools.bits.table import as_text

pytest.importorskip("numba")

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

SAMPLE = ("nixl", "storage", "decode-killed")
"""Handed off, found again, and computed again elsewhere, in one cluster."""


@pytest.mark.parametrize("model", ["llama", "bamba"])
def test_an_answer_through_a_cluster_has_the_bits_of_the_cold_run(model: str) -> None:
    ways = [SERVED_WAYS[name] for name in SAMPLE]
    cells = list(served_cells([model], ["bfloat16"], ways, num_prompts=1, num_tokens=48))
    assert all(cell.is_exact for cell in cells), as_text(cells)
    assert [cell.way for cell in cells] == list(SAMPLE)
    assert sum(cell.tried for cell in cells) >= 2, "NIXL may be missing; the others may not"
