"""A sample of the table of bits: whatever way led to an answer, it has the cold run's bits.

The whole table is made by hand (`python -m tools.bits`); no cell of it is an exception.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tools.bits.measured_engine import DTYPES
from tools.bits.step_record import recorded_steps
from tools.bits.table import as_text, measured_cells
from tools.bits.ways import WAYS

from tools.bits import models

pytest.importorskip("numba")

SAMPLE = ("chunks-16", "chunks-37", "hit-last", "batch-6", "drafts-model", "retracted", "turn-2")
"""Cut elsewhere, found, among others, drafted, computed again, gone on with: one way of each."""


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", models.named("families"))
def test_an_answer_has_the_bits_of_the_cold_run(model: str, dtype: str) -> None:
    ways = [WAYS[name] for name in SAMPLE]
    with recorded_steps() as record:
        cells = list(measured_cells([model], [dtype], ways, record, num_prompts=1, num_tokens=16))
    assert all(cell.is_exact for cell in cells), as_text(cells)
    assert {cell.way for cell in cells if cell.tried} == set(SAMPLE), as_text(cells)
