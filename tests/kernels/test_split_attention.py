"""On a card, attention in one order of sums: prefill, decode and any cut give a query equal bits.

Splits are short here, so that a few keys make several of them.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.kernels.one_kernel import noted_kernels
from tests.kernels.test_one_order_of_attention import HeadSizes, Prompt
from tests.kernels.test_windows_and_sinks import decode_case, prefill_case
from torch import Tensor

from ferryman_kernels.attention._paged_attention_triton import (
    paged_attention_decode_triton,
    paged_attention_prefill_triton,
)
from ferryman_kernels.attention.splits import _split_attention_triton as split_attention
from ferryman_kernels.attention.splits._split_attention_triton import (
    split_decode_triton,
    split_prefill_triton,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tensors are the processor's")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SPLIT = 64
PAGE = 16
SEEN: list[tuple[int, dict[str, Any]]] = [(0, {}), (40, {"sinks": True}), (0, {"score_cap": 5.0})]
"""Windows, and what else decides what is seen."""

every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_attention, "SPLIT_KEYS", SPLIT)


def asked(prompt: Prompt, seen: dict[str, Any]) -> dict[str, Any]:
    heads = prompt.heads.kv * prompt.heads.group
    return {**seen, "sinks": torch.linspace(-2, 2, heads)} if "sinks" in seen else seen


def decoded(prompt: Prompt, positions: list[int], window: int, seen: dict[str, Any]) -> Tensor:
    """The queries at `positions`, all in one step."""
    keys, values, table = prompt.pages(PAGE, prompt.length)
    at = torch.tensor(positions)
    tables = table.expand(len(at), -1).contiguous()
    return split_decode_triton(
        prompt.q[at], keys, values, tables, at, prompt.scale, window, **asked(prompt, seen)
    )


def prefilled(prompt: Prompt, cuts: list[int], window: int, seen: dict[str, Any]) -> Tensor:
    """All queries, in chunks that end at `cuts`; later keys are not there yet."""
    rows = []
    for low, high in zip([0, *cuts], [*cuts, prompt.length], strict=True):
        keys, values, table = prompt.pages(PAGE, high)
        given = prompt.q[low:high], keys, values, table, ((low, high),), prompt.scale, window
        rows.append(split_prefill_triton(*given, **asked(prompt, seen)))
    return torch.cat(rows)


@every_dtype
@pytest.mark.parametrize(("window", "seen"), SEEN, ids=str)
def test_prefill_in_any_chunks_has_the_bits_of_decode(
    dtype: torch.dtype, window: int, seen: dict[str, Any]
) -> None:
    prompt = Prompt(135, HeadSizes(1, 3, 24), dtype)
    positions = [0, 17, 63, 64, 134]
    with noted_kernels() as compiled:
        whole = prefilled(prompt, [], window, seen)
        assert torch.equal(prefilled(prompt, [37, 90], window, seen), whole)
        together = decoded(prompt, positions, window, seen)
        assert torch.equal(together, whole[positions])
        alone = [decoded(prompt, [position], window, seen) for position in positions[-1:]]
        assert torch.equal(torch.cat(alone), whole[positions[-1:]])
    assert sorted(str(name) for name, *_ in compiled) == [
        "_fold_splits_kernel",
        "_split_attention_kernel",
    ], compiled


@every_dtype
def test_neighbours_and_wider_tables_leave_the_bits(dtype: torch.dtype) -> None:
    prompt = Prompt(100, HeadSizes(2, 1, 16), dtype)
    keys, values, table = prompt.pages(PAGE, prompt.length)
    given = keys, values, torch.cat((table, table)), ((70, 100), (0, 70)), prompt.scale, 0
    q = torch.cat((prompt.q[70:], prompt.q[:70]))
    both = split_prefill_triton(q, *given)
    whole = prefilled(prompt, [], 0, {})
    assert torch.equal(torch.cat((both[30:], both[:30])), whole)
    wide = torch.cat((table, torch.full((1, 30), -1)), dim=1)
    last = split_decode_triton(
        prompt.q[99:], keys, values, wide, torch.tensor([99]), prompt.scale, 0
    )
    assert torch.equal(last, whole[99:])


@pytest.mark.parametrize("window", [0, 13, 70])
def test_it_is_attention(window: int) -> None:
    rng = random.Random(window)
    torch.manual_seed(window)
    for case, run in ((prefill_case, split_prefill_triton), (decode_case, split_decode_triton)):
        found, expected = case(run, rng, window, torch.float32, 140)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_query_that_pads_a_batch_gets_zeros() -> None:
    prompt = Prompt(20, HeadSizes(1, 2, 16), torch.float32)
    keys, values, table = prompt.pages(PAGE, 20)
    at = torch.tensor([-1, 19])
    tables = torch.cat((torch.full_like(table, -1), table))
    found = split_decode_triton(prompt.q[:2], keys, values, tables, at, prompt.scale, 0)
    assert not found[0].any()
    assert found[1].any()


def test_a_score_that_is_no_number_stays_none() -> None:
    """Also where splits without it follow."""
    prompt = Prompt(150, HeadSizes(1, 2, 16), torch.float32)
    prompt.keys[3] = torch.nan
    assert decoded(prompt, [149], 0, {}).isnan().all()
    assert prefilled(prompt, [], 0, {})[149].isnan().all()


def test_splits_that_follow_the_rows_are_caught() -> None:
    """The tests above can fail: the other kernels' prefill and decode are two orders."""
    prompt = Prompt(150, HeadSizes(1, 3, 24), torch.float32)
    keys, values, table = prompt.pages(PAGE, 150)
    seen = keys, values, table
    whole = paged_attention_prefill_triton(prompt.q, *seen, ((0, 150),), prompt.scale, 0)
    steps = [
        paged_attention_decode_triton(
            prompt.q[p : p + 1], *seen, torch.tensor([p]), prompt.scale, 0
        )
        for p in range(100, 150, 7)
    ]
    assert not torch.equal(torch.cat(steps), whole[100::7])
    torch.testing.assert_close(torch.cat(steps), whole[100::7])
