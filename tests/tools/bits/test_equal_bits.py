"""A sample of the table of bits: whatever way led to an answer, it has the cold run's bits.

The whole table is made by hand (`python -m tools.bits`); no cell of it is an exception.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from tests.model.comparison import swept
from tools.bits.measured_engine import DTYPES
from tools.bits.step_record import recorded_steps
from tools.bits.table import as_text, measured_cells
from tools.bits.ways import WAYS

from tools.bits import models

pytest.importorskip("numba")

SAMPLE = (
    "chunks-16",
    "chunks-37",
    "hit-last",
    "batch-6",
    "mixed",
    "drafts-model",
    "retracted",
    "turn-2",
)
"""Cut elsewhere, found, among others, drafted, computed again, gone on with: one way of each."""
FORMS = (
    "gemma3:gptq",
    "bamba:awq",
    "qwen3_next:fp8",
    "gpt_oss:mxfp4",
    "gemma3:packed-int8",
    "qwen3_next:fp8-pages",
    "granite_moe_rope:adapter",
)


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def assert_equal_bits(model: str, dtype: str, sample: Sequence[str] = SAMPLE) -> None:
    ways = [WAYS[name] for name in sample]
    with recorded_steps() as record:
        cells = list(measured_cells([model], [dtype], ways, record, num_prompts=1, num_tokens=16))
    assert all(cell.is_exact for cell in cells), as_text(cells)
    assert {cell.way for cell in cells if cell.tried} == set(sample), as_text(cells)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", models.named("families"))
def test_an_answer_has_the_bits_of_the_cold_run(model: str, dtype: str) -> None:
    assert_equal_bits(model, dtype)


@pytest.mark.parametrize("model", swept(sorted({*models.named("all")} - {*models.TINY})))
def test_an_answer_of_every_other_family_has_the_bits_of_the_cold_run(model: str) -> None:
    """In float32, where no rounding hides a difference."""
    assert_equal_bits(model, "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model", FORMS)
def test_weights_and_pages_in_codes_and_adapters_have_the_bits_of_the_cold_run(
    model: str, dtype: str
) -> None:
    has_adapter = model.endswith(":adapter")  # which no draft model has
    sample = [way for way in SAMPLE if not (has_adapter and way == "drafts-model")]
    assert_equal_bits(model, dtype, sample)
