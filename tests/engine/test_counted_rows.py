"""A row that stands for a block of tokens counts in an audit once the block is closed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from ferryman.cache.manifest import Kind, SectionSpec, StateManifest, lay_out
from ferryman.cache.slots import SlotHandle
from ferryman.engine.bit_comparison import first_difference
from ferryman.schedule.events import AuditPair, HeldUnit

PAGE = 8
ROWS = {4: 2, 16: 1}
"""The rows of a page by the length of their blocks."""


@dataclass(frozen=True, slots=True)
class TwoSlots:
    """The contents of a full page as served, in slot 0, and as computed again, in slot 1."""

    contents: tuple[bytes, bytes]

    def read(self, kind: Kind, slot: int) -> bytes:
        assert kind is Kind.FULL
        return self.contents[slot]


def differs(block_len: int, row: int, index: int, num_tokens: int) -> bool:
    """Whether another `row` of page `index`, of which `num_tokens` are computed, is found."""
    spec = SectionSpec(
        "blocks", 0, (ROWS[block_len], 3), "float32", None, positions_a_row=block_len
    )
    manifest = StateManifest("model", PAGE, 1, 0, (lay_out(Kind.FULL, [spec]),))
    served = np.zeros((ROWS[block_len], 3), np.float32)
    cold = served.copy()
    cold[row, 1] = 1.0
    room = manifest.layout(Kind.FULL).slot_bytes
    slots = TwoSlots((served.tobytes().ljust(room), cold.tobytes().ljust(room)))
    handles = SlotHandle(Kind.FULL, 0, 0), SlotHandle(Kind.FULL, 1, 0)
    unit = HeldUnit(Kind.FULL, index, b"", handles[0], num_tokens, "device")
    pair = AuditPair(unit, handles[1])
    difference = first_difference(manifest, slots, [pair])  # type: ignore[arg-type]
    assert difference is None or difference.served != difference.cold
    return difference is not None


@pytest.mark.parametrize("index", [0, 1, 5])
@pytest.mark.parametrize("num_tokens", range(1, PAGE + 1))
def test_a_row_counts_once_its_block_is_closed(index: int, num_tokens: int) -> None:
    assert differs(4, 0, index, num_tokens) == (num_tokens >= 4)
    assert differs(4, 1, index, num_tokens) == (num_tokens == 8)
    assert differs(16, 0, index, num_tokens) == (num_tokens == 8 and index in (1, 5))
