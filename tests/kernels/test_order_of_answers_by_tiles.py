"""Whole answers of attention by tiles (AMX), held on processors that have none.

Decode, prefill and latents, launcher and loops, run on tiles in numpy. Channels of a query and of a
key cancel, so that a score is little but its roundings, and an answer shows its order of sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.kernels.test_one_order_of_attention import HeadSizes, Prompt
from tests.kernels.test_order_of_tiles import bits
from tests.kernels.tile_attention import SPLIT, Softening, attention
from tests.kernels.tile_processor import Processor, lent, on_each_processor, on_tiles
from torch import Tensor

from ferryman_kernels.attention import (
    _block_attention_compiled,
    _paged_attention_compiled,
    _tile_decode_compiled,
)
from ferryman_kernels.attention.latent_attention import (
    latent_attention_decode,
    latent_attention_prefill,
)
from ferryman_kernels.attention.paged_attention import (
    paged_attention_decode,
    paged_attention_prefill,
)
from ferryman_kernels.attention.splits import _attention_split_compiled, _tile_split_compiled
from ferryman_kernels.cpu import _vectors

numba = pytest.importorskip("numba")

SCALE = 2.0**20
MODULES = (
    _block_attention_compiled, _paged_attention_compiled, _tile_decode_compiled,
    _tile_split_compiled, _attention_split_compiled, _vectors,
)  # fmt: skip


@contextmanager
def on_numpy_tiles() -> Iterator[None]:
    """As on a processor that has tiles."""
    laid = SimpleNamespace(dtype=numba.types.uint16)
    with on_tiles(*MODULES) as processor, lent(processor), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tile_split_compiled, "has_tiles", lambda: True)
        for name in ("attend_split", "split_room"):
            chosen = getattr(_block_attention_compiled, f"_{name}")
            arguments = (laid,) if name == "attend_split" else (None, laid)
            patch.setattr(_block_attention_compiled, name, chosen(*arguments))
        yield


class Asked(NamedTuple):
    """Heads, and the positions from and to which there are queries."""

    heads: HeadSizes
    start: int
    end: int
    window: int = 0
    cap: float = 0.0
    has_sinks: bool = False

    def first_key(self, position: int) -> int:
        return max(0, position + 1 - self.window) if self.window else 0


CASES = [
    Asked(HeadSizes(2, 1, 64), 0, 5),
    Asked(HeadSizes(1, 1, 40), 60, 75, window=38),
    Asked(HeadSizes(1, 16, 40), 30, 38, window=13, has_sinks=True),
    Asked(HeadSizes(2, 17, 80), 45, 48, window=29, cap=2.0),
    Asked(HeadSizes(1, 2, 64), SPLIT - 1, SPLIT + 1, has_sinks=True),
    Asked(HeadSizes(1, 17, 64), SPLIT - 5, SPLIT + 12, window=23),
    Asked(HeadSizes(1, 1, 80), 2 * SPLIT + 3, 2 * SPLIT + 4, window=SPLIT + 21),
]


def drawn(asked: Asked) -> Prompt:
    prompt = Prompt(asked.end, asked.heads, torch.bfloat16, seed=asked.end)
    prompt.scale, half = SCALE, asked.heads.dim // 2
    order = torch.randperm(asked.heads.dim)
    for name, sign in (("q", 1), ("keys", -1)):
        rows = getattr(prompt, name)[..., :half]
        setattr(prompt, name, torch.cat([rows, sign * rows], -1)[..., order].contiguous())
    return prompt


def expected(prompt: Prompt, asked: Asked, sinks: Tensor | None) -> NDArray[np.uint16]:
    rows, group = [], asked.heads.group
    keys, values = bits(prompt.keys), bits(prompt.values)
    for position in range(asked.start, asked.end):
        seen = asked.first_key(position), position + 1
        for head in range(asked.heads.kv):
            own = slice(head * group, (head + 1) * group)
            q, added = bits(prompt.q)[position, own], None if sinks is None else sinks[own].numpy()
            softening = Softening(SCALE, asked.cap)
            rows.append(attention(q, keys[:, head], values[:, head], seen, softening, added))
    return np.concatenate(rows).reshape(asked.end - asked.start, -1, asked.heads.dim)


def answers(prompt: Prompt, asked: Asked, **seen: Any) -> tuple[Tensor, Tensor]:
    """Of prefill and of decode."""
    keys, values, table = prompt.pages(16, asked.end)
    q, positions = prompt.q[asked.start :], torch.arange(asked.start, asked.end)
    last, spans = (SCALE, asked.window), [(asked.start, asked.end)]
    prefilled = paged_attention_prefill(q, keys, values, table, spans, *last, **seen)
    tables = table.expand(len(q), -1)
    return prefilled, paged_attention_decode(q, keys, values, tables, positions, *last, **seen)


@on_each_processor(on_numpy_tiles)
@pytest.mark.parametrize("asked", CASES, ids=str)
def test_decode_and_prefill_have_the_order_of_tiles(asked: Asked, processor: Processor) -> None:
    prompt, heads = drawn(asked), asked.heads.kv * asked.heads.group
    sinks = torch.randn(heads) if asked.has_sinks else None
    right = expected(prompt, asked, sinks)
    with processor():
        for answer in answers(prompt, asked, sinks=sinks, score_cap=asked.cap):
            assert np.array_equal(bits(answer), right)


@on_each_processor(on_numpy_tiles)
def test_a_row_of_a_block_over_two_splits_sees_no_number_of_the_later_one(
    processor: Processor,
) -> None:
    asked = Asked(HeadSizes(1, 1, 40), SPLIT - 3, SPLIT + 5)
    prompt = drawn(asked)
    clean = expected(prompt, asked, None)
    prompt.values[SPLIT + 1, 0, 5] = torch.nan
    with processor():
        for answer in answers(prompt, asked):
            assert np.array_equal(bits(answer)[:4], clean[:4])
            assert answer[4:, 0, 5].isnan().all()
            assert np.array_equal(bits(answer)[:, :, 6:], clean[:, :, 6:])


@on_each_processor(on_numpy_tiles)
@pytest.mark.parametrize("heads", [1, 17])
def test_latents_have_it(heads: int, processor: Processor) -> None:
    """Every head reads the same rows, whose first channels are the values."""
    latent_dim, rope_dim, page_size, length = 40, 32, 32, 70
    dim, slots = latent_dim + rope_dim, torch.randperm(3)
    slab = torch.randn(3, page_size + 1, dim).bfloat16()
    rows = slab[slots, :page_size].flatten(0, 1)
    q, scale = torch.randn(length, heads, dim).bfloat16(), 0.2
    at = torch.tensor([0, 31, 40, 69])
    right = [
        attention(
            bits(q[position]), bits(rows[: position + 1]), bits(rows[: position + 1, :latent_dim]),
            (0, int(position) + 1), Softening(scale),
        )
        for position in at
    ]  # fmt: skip
    pages, table = slab[:, :page_size], slots[None]
    with processor():
        tables = table.expand(len(at), -1)
        decoded = latent_attention_decode(q[at], pages, tables, at, latent_dim, scale)
        span = [(60, length)]
        prefilled = latent_attention_prefill(q[60:], pages, table, span, latent_dim, scale)
    assert np.array_equal(bits(decoded), right)
    assert np.array_equal(bits(prefilled[-1]), right[-1])
