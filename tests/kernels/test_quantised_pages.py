"""Pages of e4m3 codes against every e4m3 number there is, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ferryman_kernels.quantised_pages import coded, named_pages, opened_pages, write_coded_kv

CODES = torch.arange(256, dtype=torch.uint8)
NUMBERS = CODES.view(torch.float8_e4m3fn).double()


def nearest(x: float) -> tuple[float, float]:
    """The least distance of an e4m3 number from x, and the number; of two the even code's."""
    distances = (NUMBERS - x).abs().nan_to_num(torch.inf)
    least = distances.min()
    codes = CODES[distances == least].tolist()
    even = [code for code in codes if code % 2 == 0] or codes
    return float(least), float(NUMBERS[even[0]])


@given(st.integers(-140, 120), st.lists(st.floats(-1, 1, width=32), min_size=4, max_size=4))
def test_a_row_has_the_least_scale_and_the_nearest_codes(power: int, numbers: list[float]) -> None:
    row = torch.tensor(numbers, dtype=torch.float64) * 2.0**power
    found = coded(row[None, None].float())
    row, scale = row.float().double(), float(found.scales)
    top = float(row.abs().max())
    if top == 0:
        assert scale == 1
    else:
        assert top / scale <= 448
        is_tiny = top < 2.0**-136  # its codes are zeros at any scale
        assert top / (scale / 2) > 448 or scale == 2.0**-126 or is_tiny
    for x, value in zip(row.tolist(), found.codes[0, 0].double().tolist(), strict=True):
        assert value == nearest(x / scale)[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_stored_values_are_exact_in_every_dtype(dtype: torch.dtype) -> None:
    rows = coded((torch.randn(50, 2, 16) * 3).to(dtype))
    assert rows.values(dtype).double().equal(rows.values(torch.float64))


def test_rows_without_numbers_stay_so() -> None:
    rows = torch.tensor([[[1.0, torch.nan]], [[torch.inf, 1.0]], [[0.0, 0.0]]])
    found = coded(rows).values(torch.float64)
    assert found[:2].isnan().any(-1).all()
    assert found[2].equal(torch.zeros(1, 2, dtype=torch.float64))


def pages_of(num_slots: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Poisoned pages of keys and values, and their scales."""
    codes = [torch.full((num_slots, 2, 4, 16), 0xFF, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.full((num_slots, 2, 4), torch.nan) for _ in range(2)]
    keys, values = (each.view(torch.float8_e4m3fn) for each in codes)
    return keys, values, scales[0], scales[1]


def test_what_is_read_is_what_was_stored_whatever_the_page() -> None:
    keys, values = torch.randn(2, 7, 2, 16, dtype=torch.float64)
    table, rows = torch.tensor([[5, 2], [0, -1]]), torch.tensor([0, 0, 0, 0, 0, 1, 1])
    positions = torch.tensor([0, 1, 2, 3, 4, 0, -1])
    state = pages_of(6)
    write_coded_kv(*state, keys, values, table, rows, positions)
    for pages, scales, given_ in zip(state[:2], state[2:], (keys, values), strict=True):
        slots, places = named_pages(table)
        opened = opened_pages(pages, scales, slots, torch.float64)
        at = places[rows[:6], positions[:6] // 4]
        assert opened[at, :, positions[:6] % 4].equal(coded(given_[:6]).values(torch.float64))
        assert scales[[1, 3, 4]].isnan().all(), "no other page is written"
        assert scales[0, :, 1:].isnan().all(), "nor anything for a token that pads a batch"


def test_a_page_is_opened_once_whatever_names_it() -> None:
    """Rows share a prefix, and a short row stands beside a long one."""
    slots, places = named_pages(torch.tensor([[4, 2, 7], [4, -1, -1]]))
    assert sorted(slots.tolist()) == [0, 2, 4, 7], "slot 0 stands for what is not named"
    assert torch.where(places < 0, -1, slots[places]).tolist() == [[4, 2, 7], [4, -1, -1]]
