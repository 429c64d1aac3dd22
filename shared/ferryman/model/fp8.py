"""Weights in 8 bits with a scale for each block of 128 by 128 (DeepSeek-V3).

    value[i, j] = e4m3[i, j] · scale_inv[i // 128, j // 128]

"Inverse" as in: what quantisation divided by. Blocks at the edges may be cut off. Only weights are
in 8 bits here; activations stay in the model's dtype, where published kernels round them as well.
"""

from __future__ import annotations

from torch import Tensor

from ferryman.model.fields import Fields

BLOCK_LEN = 128

METHOD = "fp8"
"""Its name as a `quant_method`."""


def num_blocks(length: int) -> int:
    """Along an axis of so many weights."""
    return -(-length // BLOCK_LEN)


def scaled_by_block(weight: Tensor, scales: Tensor) -> Tensor:
    """`weight` [rows, columns] times `scales` [row blocks, column blocks], in its own dtype."""
    rows, columns = weight.shape
    by_row = scales.repeat_interleave(BLOCK_LEN, 0)[:rows]
    return weight * by_row.repeat_interleave(BLOCK_LEN, 1)[:, :columns]


def check_blocks(fields: Fields) -> None:
    """Refuses other formats in 8 bits than this one, by name."""
    found = fields.raw.get("quantization_config")
    if not isinstance(found, dict):
        return
    quantisation = Fields(fields.source, found)
    expected = {"weight_block_size": [BLOCK_LEN, BLOCK_LEN], "fmt": "e4m3"}
    for name, value in expected.items():
        if quantisation.raw.get(name, value) != value:
            raise quantisation.refusal(name, str(value))
