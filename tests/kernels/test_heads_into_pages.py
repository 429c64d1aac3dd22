"""Heads into pages in one launch: the bits of the parts, and a naive model in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from tests.kernels.one_kernel import noted_kernels
from torch import Tensor

from ferryman.model.shapes.state import AttentionState, written_by_parts
from ferryman_kernels.attention.pages import write_kv_triton
from ferryman_kernels.elementwise.heads_into_pages import (
    HeadNorms,
    HeadTurn,
    ProjectedHeads,
    TokenPlaces,
    heads_into_pages,
)
from ferryman_kernels.elementwise.rms_norm import rms_norm_triton
from ferryman_kernels.elementwise.rotary import apply_rotary_triton

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-4, torch.bfloat16: 3e-2}
EPS, PAGE_SIZE, UNTOUCHED = 1e-5, 4, 77.0


@dataclass(frozen=True)
class Case:
    """A layer's heads; `half` of 0 is no rotation, and `apart` leaves a gate between heads of q."""

    q_heads: int
    kv_heads: int
    head_dim: int
    half: int
    norms: bool = True
    values: bool = False
    value_dim: int = 0
    scaling: float = 1.0
    apart: bool = False


CASES = {
    "norms, whole heads turn": Case(4, 2, 32, 16),
    "several programs of heads": Case(20, 9, 128, 64),
    "a part turns, a gate between": Case(4, 2, 32, 5, scaling=1.3, apart=True),
    "channels are no power of two": Case(6, 1, 24, 12, scaling=0.9),
    "no norms": Case(4, 4, 32, 16, norms=False),
    "no rotation": Case(4, 2, 32, 0),
    "values are normed": Case(4, 2, 32, 16, values=True),
    "values are narrow": Case(4, 2, 32, 8, norms=False, value_dim=20),
    "one head of 256": Case(1, 1, 256, 32),
}


@dataclass(frozen=True)
class WrittenCase:
    """Tokens of a case, some of which have no page, and the pages that they go to."""

    heads: ProjectedHeads
    turn: HeadTurn
    key_pages: Tensor
    value_pages: Tensor
    places: TokenPlaces

    def written(self, run: Callable[..., Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q, and all pages, of which those without a token keep their numbers."""
        pages = self.key_pages.clone(), self.value_pages.clone()
        return run(self.heads, self.turn, *pages, self.places), *pages


def layer(case: Case, dtype: torch.dtype, device: torch.device) -> WrittenCase:
    """The parts of one product's rows. Token 2 pads the step, and token 3 has lost its page."""
    positions = torch.tensor([0, 6, -1, 2, 5, 900])
    table = torch.full((5, 300), -1)
    table[0, 0], table[1, 1], table[4, 1], table[2, 225] = 3, 0, 5, 2
    rows = torch.tensor([0, 1, 0, 3, 4, 2])
    dim, value_dim = case.head_dim, case.value_dim or case.head_dim
    q_dim = dim * (2 if case.apart else 1)
    sizes = case.q_heads * q_dim, case.kv_heads * dim, case.kv_heads * value_dim
    product = (2 * torch.randn(len(rows), sum(sizes))).to(device, dtype)
    q, k, v = product.split_with_sizes(sizes, dim=1)
    heads = ProjectedHeads(
        q.view(len(rows), case.q_heads, q_dim)[:, :, :dim],
        k.view(len(rows), case.kv_heads, dim),
        v.view(len(rows), case.kv_heads, value_dim),
    )
    pages = torch.full((2, 6, case.kv_heads, PAGE_SIZE, dim), UNTOUCHED).to(device, dtype)
    places = TokenPlaces(*(part.to(device) for part in (table, rows, positions)))
    return WrittenCase(heads, turn(case, dtype, device), pages[0], pages[1], places)


def turn(case: Case, dtype: torch.dtype, device: torch.device) -> HeadTurn:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    half = case.half
    inv_freq = (10000.0 ** (-torch.arange(half, dtype=torch.float64) / max(half, 1))).to(wide)
    norms = None
    if case.norms:
        q, k, v = (1 + 0.3 * torch.randn(3, case.head_dim, dtype=torch.float64)).to(device, wide)
        norms = HeadNorms(q, k, v if case.values else None, EPS)
    return HeadTurn(norms, inv_freq.to(device), case.scaling)


def by_parts(
    heads: ProjectedHeads,
    turn: HeadTurn,
    key_pages: Tensor,
    value_pages: Tensor,
    places: TokenPlaces,
) -> Tensor:
    """The kernels of the parts, one after the other."""
    q, k, v = (part.contiguous() for part in heads)
    if turn.norms is not None:
        q, k = normed(q, turn.norms.q), normed(k, turn.norms.k)
        v = v if turn.norms.v is None else normed(v, turn.norms.v)
    if len(turn.inv_freq):
        q, k = apply_rotary_triton(q, k, places.positions, turn.inv_freq, turn.scaling)
    v = torch.nn.functional.pad(v, (0, k.shape[2] - v.shape[2]))
    write_kv_triton(key_pages, value_pages, k, v, *places)
    return q


def on_processor(
    heads: ProjectedHeads,
    turn: HeadTurn,
    key_pages: Tensor,
    value_pages: Tensor,
    places: TokenPlaces,
) -> Tensor:
    """The ops that a processor takes, one after the other."""
    return written_by_parts(AttentionState(key_pages, value_pages), heads, turn, places)


def normed(heads: Tensor, weight: Tensor) -> Tensor:
    return rms_norm_triton(heads.flatten(0, 1), weight, EPS).view_as(heads)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("name", CASES)
def test_one_launch_has_the_bits_of_the_parts(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    given = layer(CASES[name], dtype, device)
    for ours, theirs in zip(given.written(heads_into_pages), given.written(by_parts), strict=True):
        assert torch.equal(ours, theirs)


def naive_head(row: list[float], weight: list[float] | None, freqs: list[float], at: int,
               scaling: float) -> list[float]:  # fmt: skip
    """A head in Python's numbers."""
    if weight is not None:
        size = math.sqrt(sum(x * x for x in row) / len(row) + EPS)
        row = [x / size * factor for x, factor in zip(row, weight, strict=True)]
    out, half = list(row), len(freqs)
    for i, freq in enumerate(freqs):
        cos, sin = math.cos(at * freq) * scaling, math.sin(at * freq) * scaling
        out[i] = row[i] * cos - row[half + i] * sin
        out[half + i] = row[half + i] * cos + row[i] * sin
    return out


def wide(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def naive(given: WrittenCase) -> tuple[Tensor, Tensor, Tensor]:
    """q of the tokens, and pages, in float64, token by token."""
    norms, freqs = given.turn.norms, given.turn.inv_freq.tolist()
    q_weight, k_weight = (None, None) if norms is None else (norms.q.tolist(), norms.k.tolist())
    v_weight = None if norms is None or norms.v is None else norms.v.tolist()
    keys, values = given.key_pages.double().cpu(), given.value_pages.double().cpu()
    out = torch.zeros(given.heads.q.shape, dtype=torch.float64)
    table, rows, positions = (part.tolist() for part in given.places)
    for token, (row, at) in enumerate(zip(rows, positions, strict=True)):
        q, k, v = (part[token].double().tolist() for part in given.heads)
        scaling = given.turn.scaling
        for head, numbers in enumerate(q):
            out[token, head] = wide(naive_head(numbers, q_weight, freqs, at, scaling))
        page = table[row][at // PAGE_SIZE] if at >= 0 else -1
        if page >= 0:
            for head, numbers in enumerate(k):
                written = naive_head(numbers, k_weight, freqs, at, scaling)
                keys[page, head, at % PAGE_SIZE] = wide(written)
            for head, numbers in enumerate(v):
                written = naive_head(numbers, v_weight, [], at, 1.0)
                written += [0.0] * (keys.shape[3] - len(written))
                values[page, head, at % PAGE_SIZE] = wide(written)
    return out, keys, values


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("run", [on_processor, heads_into_pages])
def test_heads_are_those_of_a_naive_model(
    run: Callable[..., Tensor], name: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Padding turns by -1 like any position, and its q is nobody's."""
    place = device if run is heads_into_pages else torch.device("cpu")
    given = layer(CASES[name], dtype, place)
    for ours, expected in zip(given.written(run), naive(given), strict=True):
        assert ours.dtype == dtype
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(ours.cpu().double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["norms, whole heads turn", "several programs of heads"])
def test_a_token_has_its_bits_alone_and_by_one_compiled_kernel(
    name: str, device: torch.device
) -> None:
    given = layer(CASES[name], torch.float32, device)
    whole = given.written(heads_into_pages)[0]
    with noted_kernels() as compiled:
        for token in range(len(whole)):
            part = slice(token, token + 1)
            heads = ProjectedHeads(*(heads[part].clone() for heads in given.heads))
            rows = torch.zeros(1, dtype=torch.int64, device=device)
            table = given.places.table[given.places.rows[part], : 226 + token].contiguous()
            places = TokenPlaces(table, rows, given.places.positions[part].clone())
            pages = given.key_pages.clone(), given.value_pages.clone()
            alone = heads_into_pages(heads, given.turn, *pages, places)
            assert torch.equal(alone, whole[part])
    assert len(compiled) == 1, compiled
