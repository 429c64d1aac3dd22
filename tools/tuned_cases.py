"""The tiles that kernels could have, and calls of these kernels at shapes of published models."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from ferryman_kernels.attention import _attention_tiles as attention_tiles
from ferryman_kernels.attention import _paged_attention_triton as attention
from ferryman_kernels.attention.paged_attention import (
    paged_attention_decode,
    paged_attention_prefill,
)
from ferryman_kernels.products import _grouped_product_triton as grouped
from ferryman_kernels.products.grouped_product import (
    FP4,
    CodeStack,
    FloatStack,
    grouped_product,
    sort_pairs,
)
from ferryman_kernels.recurrence import _delta_chunk_scan_triton as delta
from ferryman_kernels.recurrence import _ssd_chunk_scan_triton as scan
from ferryman_kernels.recurrence.delta_chunk_scan import delta_chunk_scan
from ferryman_kernels.recurrence.ssd_chunk_scan import chunk_scan

CARD = torch.device("cuda")
DTYPE = torch.bfloat16
PAGE_SIZE = 64

TunedCall = tuple[Callable[[], object], int]
"""A call, and the bytes that it must read."""


@dataclass(frozen=True, slots=True)
class TunedCase:
    """Some calls of a kernel of one shape, and all values of its table to try.

    `patched` makes a value count inside a `with`; None is the table as it is.
    """

    name: str
    calls: Mapping[str, TunedCall]
    values: tuple[Any, ...]
    patched: Callable[[Any], AbstractContextManager[object]]


def _entry_of(name: str, value: Any) -> AbstractContextManager[object]:
    """A row of the tables of experts."""
    return patch.object(grouped, name, getattr(grouped, name) if value is None else value)


EXPERTS = {
    "Qwen3-Next": (512, 10, 2048, 512),
    "granite tiny": (64, 6, 1536, 512),
}
"""Experts, experts of a token, width of the model and of an expert."""

GPT_OSS = (32, 4, 2880, 2880)
"""The same, with weights in MXFP4."""

FEW_ROWS = [
    grouped.Tiles(16, out, columns, warps, stages)
    for out, columns, (warps, stages) in itertools.product(
        (32, 64, 128), (64, 128, 256), ((2, 4), (4, 3), (4, 5), (8, 3))
    )
    if 64 * 64 <= out * columns <= 128 * 128
]
MORE_ROWS = [
    grouped.Tiles(rows, out, 64, warps, stages)
    for rows, out, (warps, stages) in itertools.product(
        (32, 64, 128), (64, 128, 256), ((4, 3), (8, 3), (8, 4))
    )
]
PAIRS_PER_EXPERT = {
    "_FEW_ROWS": (0, 1, 4, 12),
    "_MANY_ROWS": (24, 96),
    "_MOST_ROWS": (192, 384),
}
"""By the row of the table that is taken for them; 0 is one token."""


def experts_cases() -> Iterator[TunedCase]:
    for model, (num_experts, per_token, hidden, inner) in EXPERTS.items():
        for kind, out_dim, in_dim in (("up", 2 * inner, hidden), ("down", hidden, inner)):
            weight = torch.randn(num_experts, out_dim, in_dim, device=CARD, dtype=DTYPE)
            product = TunedProduct(
                FloatStack(weight, None), num_experts, per_token, in_dim, kind == "up"
            )
            for name, each in PAIRS_PER_EXPERT.items():
                calls = dict(map(product.call, (n * num_experts // per_token for n in each)))
                values = FEW_ROWS if name == "_FEW_ROWS" else MORE_ROWS
                called = f"{model} {kind} {name}"
                yield TunedCase(called, calls, tuple(values), partial(_entry_of, name))


def codes_cases() -> Iterator[TunedCase]:
    """MXFP4 of gpt-oss."""
    num_experts, per_token, hidden, inner = GPT_OSS
    for kind, out_dim, in_dim in (("up", 2 * inner, hidden), ("down", hidden, inner)):
        shape = (num_experts, out_dim)
        codes = torch.randint(0, 256, (*shape, in_dim // 2), dtype=torch.uint8, device=CARD)
        powers = torch.randint(120, 130, (*shape, in_dim // 32), dtype=torch.uint8, device=CARD)
        groups = (torch.arange(in_dim, device=CARD) // 32).int().repeat(num_experts, 1)
        scales = powers.view(torch.float8_e8m0fnu)
        stack = CodeStack(codes, FP4, scales, None, groups, 32, None)
        product = TunedProduct(stack, num_experts, per_token, in_dim, kind == "up")
        for name, rows, each in (("_FEW_CODES", 16, (0, 4, 12)), ("_MANY_CODES", 64, (64, 256))):
            calls = dict(map(product.call, (n * num_experts // per_token for n in each)))
            tiles = itertools.product((32, 64, 128), (4, 8), (2, 4))
            values = tuple(grouped.Tiles(rows, out, 32, warps, n) for out, warps, n in tiles)
            yield TunedCase(f"gpt-oss {kind} {name}", calls, values, partial(_entry_of, name))


@dataclass(frozen=True, slots=True)
class TunedProduct:
    """One product of all experts: up, where a token's pairs read one row, or down."""

    stack: FloatStack | CodeStack
    num_experts: int
    per_token: int
    in_dim: int
    is_up: bool

    def call(self, tokens: int) -> tuple[str, TunedCall]:
        """A call for so many tokens, at least one, and its name."""
        tokens = max(1, tokens)
        chosen = torch.rand(tokens, self.num_experts, device=CARD).topk(self.per_token).indices
        order, starts = sort_pairs(chosen, self.num_experts)
        rows = tokens if self.is_up else tokens * self.per_token
        x = torch.randn(rows, self.in_dim, device=CARD, dtype=DTYPE)
        used = len(set(chosen.flatten().tolist()))
        tensor = self.stack.weight if isinstance(self.stack, FloatStack) else self.stack.codes
        num_bytes = used * tensor[0].numel() * tensor.element_size()
        run = partial(grouped_product, x, self.stack, order, starts)
        return f"{tokens} tokens", (run, num_bytes)


HEADS = {"64": (64, 8, 64), "128": (32, 8, 128), "256": (16, 2, 256)}
"""Query heads, key heads, width of a head, by the width."""


def decode_cases() -> Iterator[TunedCase]:
    values = [
        (splits, attention_tiles.DecodeTiles(keys, warps, stages))
        for splits, keys, (warps, stages) in itertools.product(
            (128, 256, 512), (32, 64, 128), ((2, 3), (4, 2), (4, 3), (8, 3))
        )
    ]
    for name, (q_heads, kv_heads, head_dim) in HEADS.items():
        calls = dict[str, TunedCall]()
        for requests, context in ((1, 1024), (32, 8192)):
            per_request = context // PAGE_SIZE
            page = (requests * per_request, kv_heads, PAGE_SIZE, head_dim)
            keys, content = (torch.randn(page, device=CARD, dtype=DTYPE) for _ in range(2))
            table = torch.randperm(page[0], device=CARD).view(requests, per_request)
            last = torch.full((requests,), context - 1, device=CARD)
            q = torch.randn(requests, q_heads, head_dim, device=CARD, dtype=DTYPE)
            args = (q, keys, content, table, last, 0.1)
            num_bytes = 2 * keys.numel() * keys.element_size()
            calls[f"{requests} × {context}"] = partial(paged_attention_decode, *args), num_bytes
        yield TunedCase(f"decode, heads of {name}", calls, tuple(values), _decode_patched)


@contextmanager
def _decode_patched(value: Any) -> Iterator[None]:
    """The fewest keys of a split, and the tiles of all widths."""
    splits, tiles = value or (attention.SPLIT_KEYS, None)
    table = attention_tiles._DECODE_TILES if tiles is None else {512: tiles}
    with (
        patch.object(attention, "SPLIT_KEYS", splits),
        patch.object(attention_tiles, "_DECODE_TILES", table),
    ):
        yield


def prefill_cases() -> Iterator[TunedCase]:
    values = [
        attention_tiles.PrefillTiles(queries, keys, warps, stages)
        for queries, keys, (warps, stages) in itertools.product(
            (64, 128), (32, 64, 128), ((4, 2), (4, 3), (8, 2), (8, 3))
        )
    ]
    for name, (q_heads, kv_heads, head_dim) in HEADS.items():
        calls = dict[str, TunedCall]()
        for context in (2048, 8192):
            chunk = 2048
            per_request = context // PAGE_SIZE
            page = (per_request, kv_heads, PAGE_SIZE, head_dim)
            keys, content = (torch.randn(page, device=CARD, dtype=DTYPE) for _ in range(2))
            table = torch.randperm(per_request, device=CARD).view(1, per_request)
            q = torch.randn(chunk, q_heads, head_dim, device=CARD, dtype=DTYPE)
            args = (q, keys, content, table, ((context - chunk, context),), 0.1)
            num_bytes = 2 * keys.numel() * keys.element_size()
            run = partial(paged_attention_prefill, *args)
            calls[f"the last {chunk} of {context}"] = run, num_bytes
        yield TunedCase(f"prefill, heads of {name}", calls, tuple(values), _prefill_patched)


def _prefill_patched(value: Any) -> AbstractContextManager[object]:
    table = attention_tiles._PREFILL_TILES if value is None else {512: value}
    return patch.object(attention_tiles, "_PREFILL_TILES", table)


class _Constants:
    """Puts numbers in place of a module's constants."""

    def __init__(self, module: Any, names: Sequence[str]) -> None:
        self._module, self._names = module, names

    @contextmanager
    def __call__(self, value: Any) -> Iterator[None]:
        with ExitStack() as stack:
            for name, number in zip(self._names, value or (), strict=False):
                stack.enter_context(patch.object(self._module, name, number))
            yield


SCANNED = 2048
"""Tokens of a scan, in blocks of 64."""


def mamba_cases() -> Iterator[TunedCase]:
    """Granite 4 H micro."""
    tokens = SCANNED
    x = torch.randn(tokens, 64, 64, device=CARD, dtype=DTYPE)
    B, C = (torch.randn(tokens, 1, 128, device=CARD, dtype=DTYPE) for _ in range(2))
    dt, A = torch.rand(tokens, 64, device=CARD), -torch.rand(64, device=CARD)
    slot, spans = torch.zeros(1, dtype=torch.int64, device=CARD), ((0, tokens),)
    states, skip = torch.zeros(1, 64, 64, 128, device=CARD), torch.randn(64, device=CARD)
    run = partial(chunk_scan, x, dt, A, B, C, skip, states, spans, slot, (), 64)
    names = ("ADD_PART", "ADD_WARPS", "SEE_PART", "SEE_DIM", "SEE_WARPS")
    values = tuple(itertools.product((32, 64, 128), (4, 8), (32, 64), (32, 64), (4, 8)))
    calls = {f"{tokens} tokens": (run, 2 * x.numel() * x.element_size())}
    yield TunedCase("scan of Mamba", calls, values, _Constants(scan, names))


def delta_cases() -> Iterator[TunedCase]:
    """Qwen3-Next."""
    tokens = SCANNED
    slot, spans = torch.zeros(1, dtype=torch.int64, device=CARD), ((0, tokens),)
    q, k = torch.nn.functional.normalize(torch.randn(2, tokens, 16, 128, device=CARD), dim=-1)
    v = torch.randn(tokens, 32, 128, device=CARD, dtype=DTYPE)
    gates = -torch.rand(tokens, 32, device=CARD), torch.rand(tokens, 32, device=CARD)
    states = torch.zeros(1, 32, 128, 128, device=CARD)
    run = partial(delta_chunk_scan, q, k, v, *gates, states, spans, slot, (), 64)
    tiles = tuple(itertools.product((16, 32, 64), (2, 4, 8)))
    calls = {f"{tokens} tokens": (run, 2 * v.numel() * v.element_size())}
    yield TunedCase("delta rule", calls, tiles, _Constants(delta, ("PART_DIM", "WARPS")))


KERNELS: dict[str, Callable[[], Iterator[TunedCase]]] = {
    "experts": experts_cases,
    "codes": codes_cases,
    "decode": decode_cases,
    "prefill": prefill_cases,
    "mamba": mamba_cases,
    "delta": delta_cases,
}
