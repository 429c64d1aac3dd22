"""On a card, too, a recurrence under `bits` computes a token from the tokens before it alone.

The checks are those of the processor's loops (`test_one_order_of_recurrences.py`), with Triton's
interpreter; besides, prefill and decode take one compiled kernel, however many tokens there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch
from tests.kernels import test_one_order_of_recurrences as loops
from tests.kernels.like_a_card import on_a_card
from tests.kernels.one_kernel import noted_kernels
from tests.kernels.test_one_order_of_recurrences import Recurrence

from ferryman_kernels.recurrence import token_scans
from ferryman_kernels.recurrence.ssd_chunk_scan import chunk_scan
from ferryman_kernels.recurrence.ssd_decode import selective_state_update

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tensors are the processor's")

KINDS = [loops.mamba, loops.lightning, loops.gated_delta, loops.channel_delta, loops.selective]
every_kind = pytest.mark.parametrize("kind", KINDS)
Kind = Callable[[int, torch.dtype], Recurrence]
TOKENS, CHUNK = 11, 4
DTYPES = [torch.float32, torch.bfloat16]
# A convolution has a kernel for tiles of tokens and one for single ones.
RECURRENT = ("_ssd_runs_kernel", "_delta_runs_kernel", "_selective_runs_kernel")


@pytest.fixture(autouse=True)
def _ops_by_token() -> Iterator[None]:
    with patch.multiple(
        loops,
        CHUNK=CHUNK,
        chunk_scan=token_scans.chunk_scan_by_token,
        selective_state_update=token_scans.state_update_by_token,
        mamba_step=token_scans.mamba_step_by_token,
        delta_chunk_scan=token_scans.delta_scan_by_token,
        delta_step=token_scans.delta_step_by_token,
    ):
        yield


def by_token(way: Recurrence, tokens: int) -> tuple[torch.Tensor, loops.States]:
    """y of single tokens through decode, in place and then in another slot, and their states."""
    states, places = way.copied_states(), [2] * 7 + [5] * (tokens - 7)
    rows = [
        way.decode(way.part(token, token + 1), states, torch.tensor([old]), torch.tensor([new]))
        for token, (old, new) in enumerate(zip([2, *places], places, strict=False))
    ]
    return torch.cat(rows), tuple(each[5] for each in states)


@every_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_single_tokens_have_the_bits_of_a_span(kind: Kind, dtype: torch.dtype) -> None:
    way = kind(TOKENS, dtype)
    with on_a_card(), noted_kernels() as compiled:
        loops._check(by_token(way, TOKENS), loops._cold(way, 2, TOKENS))
    recurrent = [name for name, *_ in compiled if name in RECURRENT]
    assert len(recurrent) == 1, compiled


@every_kind
def test_it_is_the_recurrence_of_the_processor(kind: Kind) -> None:
    way = kind(TOKENS, torch.float32)
    with on_a_card():
        found, found_states = loops._cold(way, 2, TOKENS)
    expected, states = loops._cold(way, 2, TOKENS)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    for own, other in zip(found_states, states, strict=True):
        torch.testing.assert_close(own, other, rtol=2e-5, atol=2e-5)


@every_kind
def test_spans_neighbours_and_snapshots_leave_the_bits(kind: Kind) -> None:
    """A request in two spans, among others before and behind it, with a snapshot on its way."""
    way = kind(TOKENS, torch.float32)
    others = kind(5, torch.float32)
    with on_a_card():
        states, rows = way.copied_states(), []
        for low, high, place in ((0, 6, 0), (6, TOKENS, 1)):
            parts = [others.rows]
            parts.insert(place, way.part(low, high))
            spans = [(0, 5)]
            spans.insert(place, (low, high))
            slots = torch.tensor([3, 1] if place == 0 else [0, 3])
            joined = tuple(torch.cat(each) for each in zip(*parts, strict=True))
            kept = [(place, 2 * CHUNK, 6)] if low else []
            y = way.prefill(joined, states, spans, slots, kept)
            first = 5 if place else 0
            rows.append(y[first : first + high - low])
        found = torch.cat(rows), tuple(each[3] for each in states)
        loops._check(found, loops._cold(way, 3, TOKENS))
        at_snapshot = found[0][: 2 * CHUNK], tuple(each[6] for each in states)
        loops._check(at_snapshot, loops._cold(way, 3, 2 * CHUNK))


def test_block_scans_are_caught() -> None:
    """The checks above can fail: blocks and steps are two orders of sums."""
    way = loops.lightning(TOKENS, torch.float32)
    with (
        patch.multiple(loops, chunk_scan=chunk_scan, selective_state_update=selective_state_update),
        on_a_card(),
    ):
        steps, spans = by_token(way, TOKENS), loops._cold(way, 2, TOKENS)
    torch.testing.assert_close(steps[0], spans[0], rtol=1e-3, atol=1e-3)
    assert not torch.equal(steps[0], spans[0])
