"""Loops that are told addresses stay within their tensors, and answer as the formula in float64.

Sizes and strides are drawn. Each tensor, results too, ends at a page that no process may touch, or
begins behind one; between the rows of a view lies what is no number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.fences import Fences
from torch import Tensor

from ferryman_kernels.attention.paged_attention import (
    paged_attention_decode,
    paged_attention_reference,
)
from ferryman_kernels.attention.pages import write_kv, write_kv_reference
from ferryman_kernels.elementwise.gates.clamped_swiglu import (
    clamped_swiglu,
    clamped_swiglu_reference,
)
from ferryman_kernels.elementwise.gates.gated_silu import gated_silu, gated_silu_reference
from ferryman_kernels.elementwise.gates.limited_silu import limited_silu, limited_silu_reference
from ferryman_kernels.elementwise.rms_norm import (
    add_rms_norm,
    gated_rms_norm,
    gated_rms_norm_reference,
    grouped_rms_norm,
    rms_norm,
    rms_norm_reference,
    rms_norm_then_gate,
    rms_norm_then_gate_reference,
    scaled_sum,
)
from ferryman_kernels.elementwise.rotary import apply_rotary, apply_rotary_reference
from ferryman_kernels.elementwise.streams.hyper_connection import (
    Balance,
    GateNumbers,
    expand_streams,
    expand_streams_reference,
    mix_streams,
    mix_streams_reference,
    read_streams,
    read_streams_reference,
)
from ferryman_kernels.elementwise.streams.keyed_value import (
    StreamNorms,
    keyed_value,
    keyed_value_reference,
)
from ferryman_kernels.elementwise.streams.stream_mean import (
    gated_stream_mean,
    gated_stream_mean_reference,
)
from ferryman_kernels.products.int8_product import (
    int8_product,
    int8_product_reference,
    int8_quad_product,
    int8_quad_product_reference,
    quads_of_codes,
)
from ferryman_kernels.products.packed_product import (
    pack_panels,
    packed_grouped_product,
    packed_product,
    packed_product_reference,
    reads_panels,
    stack_panels,
)
from ferryman_kernels.products.weighted_sum import weighted_sum, weighted_sum_reference
from ferryman_kernels.recurrence.causal_conv import (
    causal_conv_decode,
    causal_conv_decode_reference,
    causal_conv_prefill,
    causal_conv_prefill_reference,
)
from ferryman_kernels.recurrence.delta_chunk_scan import (
    delta_chunk_scan,
    delta_chunk_scan_reference,
)
from ferryman_kernels.recurrence.delta_step import DeltaWeights, delta_step, delta_step_reference
from ferryman_kernels.recurrence.mamba_step import StepWeights, mamba_step, mamba_step_reference
from ferryman_kernels.recurrence.ssd_chunk_scan import chunk_scan, chunk_scan_reference

pytest.importorskip("numba")

SHARE_OF_LARGEST = {torch.float32: 2e-5, torch.bfloat16: 2.0**-6}
"""The error allowed, as a share of the largest number in a result, by the coarsest dtype of the
arguments: sums and roundings of three operations in a row."""

drawn = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def _seeded(at_end: bool, seed: int) -> Fences:
    torch.manual_seed(seed)
    return Fences(at_end=at_end)


both_ends = st.builds(_seeded, at_end=st.booleans(), seed=st.integers(0, 1 << 20))
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
tokens_drawn = st.integers(1, 6)


def wide(value: Any) -> Any:
    """Tensors of numbers, alone or in tuples, in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value.clone()
    if isinstance(value, tuple):
        parts = [wide(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def fence(fences: Fences, value: Any) -> Any:
    if isinstance(value, Tensor):
        return fences.copy(value)
    if isinstance(value, tuple):
        parts = [fence(fences, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def check(
    fences: Fences,
    op: Callable[..., Any],
    formula: Callable[..., Any],
    *args: Any,
    written: tuple[int, ...] = (),
) -> None:
    """Compares results, and the arguments that are `written`, with those of the formula."""
    expected_args, given_args = [wide(each) for each in args], [fence(fences, e) for e in args]
    expected = formula(*expected_args)
    with fences.around_results():
        found = op(*given_args)
    results = [each if isinstance(each, tuple) else (each,) for each in (found, expected)]
    pairs = [pair for pair in zip(*results, strict=True) if pair[0] is not None]
    pairs += [(given_args[place], expected_args[place]) for place in written]
    share = max(SHARE_OF_LARGEST.get(each.dtype, 0) for each in args if isinstance(each, Tensor))
    for left, right in pairs:
        assert left.shape == right.shape
        limit = share * max(1.0, float(right.abs().max())) if right.numel() else 0.0
        assert float((left.double() - right).abs().max()) <= limit


def rows_in(tokens: int, dim: int, lead: int, dtype: torch.dtype) -> Tensor:
    """Rows as a part of a wider product's, `lead` numbers apart."""
    return torch.randn(tokens, lead + dim).to(dtype)[:, lead:]


def by_head(rows: Tensor, heads: int) -> Tensor:
    """[tokens, heads, dim] of rows, which may be parts of wider ones."""
    return rows.view(len(rows), heads, -1)


@drawn
@given(both_ends, dtypes, tokens_drawn, st.integers(1, 70), st.integers(0, 3), st.integers(1, 3))
def test_norms(
    fences: Fences, dtype: torch.dtype, tokens: int, part: int, lead: int, groups: int
) -> None:
    dim = part * groups
    x, other = (rows_in(tokens, dim, lead, dtype) for _ in range(2))
    weight = torch.randn(dim)
    check(fences, rms_norm, rms_norm_reference, x, weight, 1e-6)
    check(fences, gated_rms_norm, gated_rms_norm_reference, x, other, weight, 1e-6, groups)
    check(fences, rms_norm_then_gate, rms_norm_then_gate_reference, x, other, weight, 1e-6, groups)
    check(fences, grouped_rms_norm, rms_norm_reference, x, weight, 1e-6, groups)

    def added(x: Tensor, other: Tensor, scale: float, weight: Tensor, eps: float) -> Any:
        total = x + scale * other
        return total, rms_norm_reference(total, weight, eps)

    check(fences, add_rms_norm, added, x, other, 0.25, weight, 1e-6)
    check(fences, scaled_sum, lambda x, other, scale: x + scale * other, x, other, 0.25)


@drawn
@given(both_ends, dtypes, tokens_drawn, st.integers(1, 70), st.integers(0, 3), st.integers(1, 4))
def test_activations_and_sums(
    fences: Fences, dtype: torch.dtype, tokens: int, dim: int, lead: int, count: int
) -> None:
    x = rows_in(tokens, 2 * dim, lead, dtype)
    check(fences, gated_silu, gated_silu_reference, x)
    check(fences, clamped_swiglu, clamped_swiglu_reference, x, 1.702, 1.5, 1.0)
    check(fences, clamped_swiglu, clamped_swiglu_reference, x, 1.0, 0.5, 0.0)
    check(fences, limited_silu, limited_silu_reference, x, 1.5)
    rows, shares = torch.randn(tokens, count, dim).to(dtype), torch.rand(tokens, count).to(dtype)
    check(fences, weighted_sum, weighted_sum_reference, rows, shares)


@drawn
@given(both_ends, dtypes, tokens_drawn, st.integers(1, 70), st.integers(0, 3), st.integers(1, 4))
def test_streams(
    fences: Fences, dtype: torch.dtype, tokens: int, dim: int, lead: int, count: int
) -> None:
    streams, mixes = torch.randn(tokens, count, dim).to(dtype), torch.randn(tokens, 2 * count)
    scales, base, factors, added = torch.randn(4, 2 * count).unbind()
    numbers = GateNumbers(scales, base, factors, added, 1e-5)
    check(fences, read_streams, read_streams_reference, streams, mixes, numbers)
    written = rows_in(tokens, dim, lead, dtype)
    gates = rows_in(tokens, count, lead, torch.float32)
    check(fences, expand_streams, expand_streams_reference, streams, written, gates)
    opened = torch.randn(tokens, count, dim).to(dtype)
    check(fences, gated_stream_mean, gated_stream_mean_reference, streams, opened)
    key, stream, taken = torch.randn(3, count, dim).unbind()
    norms = StreamNorms(key, stream, taken, 1e-5)
    check(fences, keyed_value, keyed_value_reference, opened, streams, written, norms)


@drawn
@given(both_ends, dtypes, tokens_drawn, st.integers(1, 70), st.integers(0, 3), st.integers(1, 4))
def test_mixed_streams(
    fences: Fences, dtype: torch.dtype, tokens: int, dim: int, lead: int, count: int
) -> None:
    num_logits = (2 + count) * count
    streams, mixes = torch.randn(tokens, count, dim).to(dtype), torch.randn(tokens, num_logits)
    (scales, base), (factors, added) = torch.randn(2, num_logits), torch.randn(2, 2 * count)
    numbers = GateNumbers(scales, base, factors, added, 1e-5, Balance(3, 1e-3))
    check(fences, read_streams, read_streams_reference, streams, mixes, numbers)
    gates = rows_in(tokens, count + count * count, lead, torch.float32)
    written = rows_in(tokens, dim, lead, dtype)
    check(fences, mix_streams, mix_streams_reference, streams, written, gates)


@drawn
@given(both_ends, dtypes, tokens_drawn, st.data())
def test_rotation_writing_and_attention(
    fences: Fences, dtype: torch.dtype, tokens: int, data: st.DataObject
) -> None:
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    head_dim = data.draw(st.sampled_from([2, 6, 16, 40, 64, 80]))
    page_size, pages = data.draw(st.sampled_from([1, 4, 16])), data.draw(st.integers(1, 4))
    q_heads, lead = kv_heads * group, data.draw(st.integers(0, 5))
    sizes = q_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim
    joined = torch.randn(tokens, lead + sum(sizes)).to(dtype)[:, lead:]
    q, k, v = (
        by_head(part, part.shape[1] // head_dim) for part in joined.split_with_sizes(sizes, dim=1)
    )
    half = data.draw(st.integers(1, head_dim // 2))
    last = page_size * pages - 1
    positions = torch.tensor(
        data.draw(st.lists(st.integers(-1, last), min_size=tokens, max_size=tokens))
    )
    frequencies = torch.rand(half)
    check(
        fences, apply_rotary, apply_rotary_reference, q, k, positions.clamp_min(0), frequencies, 1.5
    )

    # The slab of a layer: keys, then values, then those of another layer.
    slots, page = pages + 1, kv_heads * page_size * head_dim
    slab = torch.randn(slots, 2 * page + 64).to(dtype)
    shape = (slots, kv_heads, page_size, head_dim)
    strides = (slab.stride(0), page_size * head_dim, head_dim, 1)
    key_pages = slab.as_strided(shape, strides, 0)
    value_pages = slab.as_strided(shape, strides, page)
    table = torch.stack([torch.randperm(slots)[:pages] for _ in range(tokens)])
    rows = torch.arange(tokens)

    def write(*args: Any) -> None:
        write_kv(*args)

    # Tokens of a place that another one writes too have no order in the formula.
    places = [
        (int(table[i, p // page_size]), p % page_size) for i, p in enumerate(positions.tolist())
    ]
    alone = torch.tensor([p if p >= 0 and places.count(at) == 1 else -1
                          for p, at in zip(positions.tolist(), places, strict=True)])  # fmt: skip
    check(
        fences, write, write_kv_reference, key_pages, value_pages, k, v, table, rows, alone,
        written=(0, 1),
    )  # fmt: skip

    window = data.draw(st.sampled_from([0, 1, 5]))
    sinks = torch.randn(q_heads) if data.draw(st.booleans()) else None
    cap = data.draw(st.sampled_from([0.0, 3.0]))

    def attend(
        q: Tensor, keys: Tensor, values: Tensor, table: Tensor, at: Tensor, *rest: Any
    ) -> Tensor:
        spans = [(p, p + 1) for p in at.clamp_min(0).tolist()]
        seen = paged_attention_reference(q, keys, values, table, spans, *rest)
        return seen.masked_fill((at < 0)[:, None, None], 0)

    seen = q, key_pages, value_pages, table, positions, head_dim**-0.5, window, sinks, cap
    check(fences, paged_attention_decode, attend, *seen)


def _slots(data: st.DataObject, requests: int, slots: int) -> tuple[Tensor, Tensor]:
    """Slots that are read and written: in place, elsewhere or nowhere, none by two requests."""
    free = data.draw(st.permutations(range(slots)))
    reads, writes = [], []
    for i in range(requests):
        own, other = free[2 * i], free[2 * i + 1]
        reads.append(data.draw(st.sampled_from([own, -1])))
        writes.append(data.draw(st.sampled_from([own, other, -1])))
    return torch.tensor(reads), torch.tensor(writes)


def _slab(slots: int, shape: tuple[int, ...], gap: int, dtype: torch.dtype) -> Tensor:
    return (
        torch.randn(slots, int(torch.tensor(shape).prod()) + gap)
        .to(dtype)[:, gap:]
        .view(slots, *shape)
    )


@drawn
@given(both_ends, dtypes, st.integers(1, 3), st.data())
def test_steps(fences: Fences, dtype: torch.dtype, requests: int, data: st.DataObject) -> None:
    small = st.integers(1, 9)
    groups, per_group, head_dim, state = (data.draw(small) for _ in range(4))
    width, gap, lead = data.draw(st.integers(2, 5)), 8 * data.draw(small), data.draw(small)
    heads, slots = groups * per_group, 2 * requests + 1
    conv_dim = heads * head_dim + 2 * groups * state
    places = _slots(data, requests, slots)
    conv = _slab(slots, (conv_dim, width - 1), gap, dtype)
    joined = rows_in(requests, conv_dim + 2 * heads, lead, dtype)
    mixed, a, b = joined.split_with_sizes((conv_dim, heads, heads), dim=1)
    weights = StepWeights(
        torch.randn(conv_dim, width),
        torch.randn(conv_dim) if data.draw(st.booleans()) else None,
        -torch.rand(heads), torch.randn(heads), torch.randn(heads), (0.0, 0.5),
    )  # fmt: skip
    ssm = _slab(slots, (heads, head_dim, state), gap, torch.float32)
    given: tuple[Any, ...] = mixed, a, weights, conv, ssm, *places
    check(fences, mamba_step, mamba_step_reference, *given, written=(3, 4))
    given = mixed, conv, weights.conv_weight, weights.conv_bias, *places
    check(fences, causal_conv_decode, causal_conv_decode_reference, *given, written=(1,))

    # Of one or two small numbers the length is mostly the constant below the root.
    k_heads, k_dim = groups, state + 3
    conv_dim = heads * head_dim + 2 * k_heads * k_dim
    conv = _slab(slots, (conv_dim, width - 1), gap, dtype)
    joined = rows_in(requests, conv_dim + 2 * heads, lead, dtype)
    mixed, a, b = joined.split_with_sizes((conv_dim, heads, heads), dim=1)
    unit = torch.full((k_dim,), k_dim**-0.5)
    rates = DeltaWeights(
        torch.randn(conv_dim, width), unit, torch.rand(heads), torch.randn(heads), 1.0
    )
    ssm = _slab(slots, (heads, k_dim, head_dim), gap, torch.float32)
    given = mixed, a, b, rates, conv, ssm, *places
    check(fences, delta_step, delta_step_reference, *given, written=(4, 5))


@drawn
@given(both_ends, dtypes, st.data())
def test_scans(fences: Fences, dtype: torch.dtype, data: st.DataObject) -> None:
    small = st.integers(1, 9)
    groups, per_group, head_dim, state, gap = (data.draw(small) for _ in range(5))
    state *= data.draw(st.sampled_from([1, 9]))
    heads, chunk = groups * per_group, data.draw(st.sampled_from([1, 4, 16, 70]))
    spans, snapshots = [], []
    for request in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, 90))
        end = start + data.draw(st.integers(1, 90))
        spans.append((start, end))
        grid = [p for p in range(start + 1, end) if p % chunk == 0]
        if grid:
            snapshots.append((request, data.draw(st.sampled_from(grid)), 5 + request))
    tokens, slots = sum(end - start for start, end in spans), torch.randperm(5)[: len(spans)]
    sizes = heads * head_dim, groups * state, groups * state, heads, heads
    joined = torch.randn(tokens, gap + sum(sizes)).to(dtype)[:, gap:]
    x, B, C, _, _ = joined.split_with_sizes(sizes, dim=1)
    x, B, C = (
        by_head(x, heads),
        by_head(B, groups),
        by_head(C, groups),
    )
    ssm = _slab(8, (heads, head_dim, state), gap, torch.float32)
    steps = 0.2 * torch.rand(tokens, heads), -torch.rand(heads)
    given: tuple[Any, ...] = (
        x,
        *steps,
        B,
        C,
        torch.randn(heads),
        ssm,
        tuple(spans),
        slots,
        tuple(snapshots),
        chunk,
    )
    check(fences, chunk_scan, chunk_scan_reference, *given, written=(6,))

    ssm = _slab(8, (heads, state, head_dim), gap, torch.float32)
    unit = torch.nn.functional.normalize
    q, k = unit(C.float(), dim=2).to(dtype), unit(B.float(), dim=2).to(dtype)
    rates = -torch.rand(tokens, heads), torch.rand(tokens, heads)
    given = q, k, x, *rates, ssm, tuple(spans), slots, tuple(snapshots), chunk
    check(fences, delta_chunk_scan, delta_chunk_scan_reference, *given, written=(5,))

    width = data.draw(st.integers(2, 5))
    conv = _slab(8, (joined.shape[1], width - 1), gap, dtype)
    taps = torch.randn(joined.shape[1], width), torch.randn(joined.shape[1])
    given = joined, conv, *taps, tuple(spans), slots, tuple(snapshots)
    check(fences, causal_conv_prefill, causal_conv_prefill_reference, *given, written=(1,))


@drawn
@given(both_ends, dtypes, st.integers(1, 9), st.integers(1, 9), st.integers(1, 140), st.booleans())
def test_products_with_codes(
    fences: Fences, dtype: torch.dtype, tokens: int, sixteens: int, out_dim: int, widens: bool
) -> None:
    """torch's own kernel reads beyond a row whose length is not a multiple of 16."""
    x = torch.randn(tokens, 16 * sixteens).to(dtype)
    codes = torch.randint(-127, 128, (out_dim, x.shape[1]), dtype=torch.int8)
    scales = (0.01 * torch.rand(out_dim)).to(dtype)

    def product(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        widened = widens or dtype is torch.float32
        return int8_product(x, codes, scales, widened_from=0 if widened else 99)

    check(fences, product, int8_product_reference, x, codes, scales)


@drawn
@given(both_ends, dtypes, st.integers(1, 40), st.integers(1, 70), st.integers(1, 140))
@pytest.mark.skipif(not reads_panels(torch.float32), reason="this processor has no AVX-512")
def test_products_with_quads_of_codes(
    fences: Fences, dtype: torch.dtype, tokens: int, quads: int, out_dim: int
) -> None:
    x = torch.randn(tokens, 4 * quads).to(dtype)
    codes = torch.randint(-128, 128, (out_dim, 4 * quads), dtype=torch.int8)
    scales = (0.01 * torch.rand(out_dim)).to(dtype)
    panels = quads_of_codes(codes, torch.device("cpu"))
    check(fences, int8_quad_product, int8_quad_product_reference, x, panels, scales)


@drawn
@given(
    both_ends, dtypes, st.integers(1, 70), st.integers(1, 140), st.integers(5, 140), st.booleans()
)
@pytest.mark.skipif(not reads_panels(torch.float32), reason="this processor has no AVX-512")
def test_products_with_packed_weights(
    fences: Fences, dtype: torch.dtype, tokens: int, in_dim: int, out_dim: int, has_bias: bool
) -> None:
    weights = [torch.randn(out_dim, in_dim).to(dtype) for _ in range(3)]
    panels = [pack_panels(weight) for weight in weights]
    x = torch.randn(tokens, in_dim).to(dtype)
    bias = torch.randn(3, out_dim).to(dtype) if has_bias else torch.zeros(1, 0, dtype=dtype)
    added = bias if has_bias else torch.zeros(3, out_dim, dtype=dtype)

    def product(x: Tensor, bias: Tensor) -> Tensor:
        return packed_product(x, panels[0], bias)

    def formula(x: Tensor, bias: Tensor) -> Tensor:
        return packed_product_reference(x, weights[0].double(), added[0].double())

    check(fences, product, formula, x, bias[0])
    chosen = torch.randint(0, 3, (tokens, 2))

    def grouped(x: Tensor, biases: Tensor, chosen: Tensor) -> Tensor:
        return packed_grouped_product(x, stack_panels(panels, biases), chosen)

    def of_each(x: Tensor, biases: Tensor, chosen: Tensor) -> Tensor:
        rows = [
            weights[e].double() @ x[t] + added[e].double()
            for t in range(tokens)
            for e in chosen[t].tolist()
        ]
        return torch.stack(rows)

    check(fences, grouped, of_each, x, bias, chosen)
