"""Launches of all Triton kernels on CPU tensors of real sizes, for `compile_kernels.py`.

Each function launches the kernels of one kind of layer. Stacks of experts are tensors without
bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ferryman_kernels.attention._latent_attention_triton import latent_attention_triton
from ferryman_kernels.attention._paged_attention_triton import (
    paged_attention_decode_triton,
    paged_attention_prefill_triton,
)
from ferryman_kernels.attention._sparse_index_triton import index_scores_triton
from ferryman_kernels.attention.blocks._block_index_triton import block_scores_triton
from ferryman_kernels.attention.blocks.block_means import block_means_triton
from ferryman_kernels.attention.blocks.joined_rows import PlacedRows, joined_rows
from ferryman_kernels.attention.latent_pages import write_latents_triton
from ferryman_kernels.attention.pages import write_kv_triton
from ferryman_kernels.attention.splits._split_attention_triton import (
    split_decode_triton,
    split_prefill_triton,
)
from ferryman_kernels.elementwise.expert_choice import (
    NO_NUMBERS,
    ExpertGroups,
    ExpertNumbers,
    ExpertRule,
    Measure,
    ShareSum,
    choose_experts_triton,
    choose_one_by_one_triton,
)
from ferryman_kernels.elementwise.finite_argmax import finite_argmax_triton
from ferryman_kernels.elementwise.gated_sum import add_gated_triton_
from ferryman_kernels.elementwise.gates.clamped_swiglu import clamped_swiglu_triton
from ferryman_kernels.elementwise.gates.gated_silu import gated_silu_triton
from ferryman_kernels.elementwise.gates.limited_silu import limited_silu_triton
from ferryman_kernels.elementwise.heads_into_pages import (
    HeadNorms,
    HeadTurn,
    ProjectedHeads,
    TokenPlaces,
    heads_into_pages,
)
from ferryman_kernels.elementwise.rms_norm import (
    add_rms_norm_triton,
    gated_rms_norm_triton,
    rms_norm_then_gate_triton,
    rms_norm_triton,
)
from ferryman_kernels.elementwise.rotary import apply_rotary_triton
from ferryman_kernels.elementwise.row_draw import DrawnRows, draw_rows_triton_
from ferryman_kernels.elementwise.streams.hyper_connection import (
    Balance,
    GateNumbers,
    expand_streams_triton,
    mix_streams_triton,
    read_streams_triton,
)
from ferryman_kernels.elementwise.streams.keyed_value import StreamNorms, keyed_value_triton
from ferryman_kernels.elementwise.streams.stream_mean import gated_stream_mean_triton
from ferryman_kernels.elementwise.table_choice import look_up_experts_triton
from ferryman_kernels.elementwise.token_penalties import (
    EarlierTokens,
    PenaltyStrengths,
    penalise_triton,
)
from ferryman_kernels.products._dense_product_triton import large_dense_product, small_dense_product
from ferryman_kernels.products._grouped_product_triton import (
    ANY_ROWS,
    FP4,
    FP8,
    INT4,
    grouped_codes_triton,
    grouped_floats_triton,
    tiles_of_any,
)
from ferryman_kernels.products.pair_order import sort_pairs_triton
from ferryman_kernels.products.weighted_sum import weighted_sum_triton
from ferryman_kernels.recurrence._delta_chunk_scan_triton import delta_chunk_scan_triton
from ferryman_kernels.recurrence._ssd_chunk_scan_triton import chunk_scan_triton
from ferryman_kernels.recurrence._ssd_runs_triton import ssd_runs_triton
from ferryman_kernels.recurrence.causal_conv import (
    causal_conv_decode_triton,
    causal_conv_prefill_triton,
)
from ferryman_kernels.recurrence.cells._block_mean_triton import block_mean_runs_triton
from ferryman_kernels.recurrence.cells._mlstm_triton import mlstm_runs_triton
from ferryman_kernels.recurrence.cells._wkv_triton import wkv_runs_triton
from ferryman_kernels.recurrence.cells.block_mean_rows import BlockedRows
from ferryman_kernels.recurrence.cells.mlstm_rows import CellGates, CellRows
from ferryman_kernels.recurrence.cells.wkv_rows import WeightedRows
from ferryman_kernels.recurrence.channel_delta_scan import delta_runs_triton
from ferryman_kernels.recurrence.delta_decode import delta_decode_triton
from ferryman_kernels.recurrence.delta_inputs import delta_inputs
from ferryman_kernels.recurrence.rg_lru import rg_lru_runs_triton
from ferryman_kernels.recurrence.selective_scan import selective_runs_triton
from ferryman_kernels.recurrence.ssd_decode import (
    raw_state_update_triton,
    selective_state_update_triton,
)
from ferryman_kernels.slots import clear_slots_triton, copy_slots_triton

PAIRS_PER_EXPERT = (1, 32, 256)
"""Pairs of a token and an expert, for each expert: a grouped product has other tiles for each."""

BLOCK = 128
"""Columns that share a scale, in FP8 and in four bits."""


def launch_norms(dtype: torch.dtype, dim: int) -> None:
    """The norm of a row of `dim` channels."""
    rms_norm_triton(torch.zeros(8, dim, dtype=dtype), torch.zeros(dim, dtype=dtype), 1e-5)


def launch_residual(dtype: torch.dtype, dim: int, scale: float) -> None:
    """A layer's output added to what entered it, and the norm of the sum."""
    rows = torch.zeros(8, dim, dtype=dtype)
    add_rms_norm_triton(rows, rows, scale, torch.zeros(dim), 1e-5)


def launch_gated_norm(dtype: torch.dtype, dim: int, groups: int) -> None:
    """The norm behind a recurrence, with the gate before and behind it."""
    rows = torch.zeros(8, dim, dtype=dtype)
    gated_rms_norm_triton(rows, rows, torch.zeros(dim, dtype=dtype), 1e-5, groups)
    rms_norm_then_gate_triton(rows, rows, torch.zeros(dim, dtype=dtype), 1e-5, groups)


def launch_activation(dtype: torch.dtype, inner_dim: int) -> None:
    """silu(gate) · up of an MLP, or of an expert."""
    gated_silu_triton(torch.zeros(8, 2 * inner_dim, dtype=dtype))


def launch_gated_sum(dtype: torch.dtype, dim: int) -> None:
    """A shared expert's output, by its gate, added to the sum of the routed ones."""
    rows = torch.zeros(8, dim, dtype=dtype)
    add_gated_triton_(rows, rows, rows[:, :1].contiguous())


def launch_limited_activation(dtype: torch.dtype, inner_dim: int, limit: float) -> None:
    """silu(gate) · up within a limit."""
    limited_silu_triton(torch.zeros(8, 2 * inner_dim, dtype=dtype), limit)


def launch_clamped_activation(
    dtype: torch.dtype, inner_dim: int, alpha: float, limit: float, added: float
) -> None:
    """The activation of an expert whose gate and up are cut."""
    clamped_swiglu_triton(torch.zeros(8, 2 * inner_dim, dtype=dtype), alpha, limit, added)


def launch_streams(dtype: torch.dtype, count: int, dim: int) -> None:
    """A part of a layer reads streams and writes to them, and the final norm reads them."""
    streams = torch.zeros(8, count, dim, dtype=dtype)
    for num_gates in (2 * count, count):
        gates = torch.zeros(8, num_gates)
        numbers = GateNumbers(gates[0], gates[0], gates[0], gates[0], 1e-5)
        read_streams_triton(streams, gates, numbers)
        expand_streams_triton(streams, streams[:, 0], gates[:, :count])


def launch_gated_streams(dtype: torch.dtype, count: int, dim: int) -> None:
    """A part of a layer reads the mean of normed streams and writes to them."""
    streams = torch.zeros(8, count, dim, dtype=dtype)
    rms_norm_triton(streams.flatten(1), torch.zeros(count * dim), 1e-5, count)
    gated_stream_mean_triton(streams, streams)
    expand_streams_triton(streams, streams[:, 0], torch.zeros(8, count))


def launch_keyed_value(dtype: torch.dtype, count: int, dim: int) -> None:
    """Streams take a value by their keys."""
    streams, weight = torch.zeros(8, count, dim, dtype=dtype), torch.zeros(count, dim)
    norms = StreamNorms(weight, weight, weight, 1e-6)
    keyed_value_triton(streams, streams, streams[:, 0], norms)


def launch_mixed_streams(dtype: torch.dtype, count: int, dim: int, rounds: int) -> None:
    """The same of streams that are mixed with each other."""
    streams = torch.zeros(8, count, dim, dtype=dtype)
    gates, alone = torch.zeros(8, (2 + count) * count), torch.zeros(8, count)
    first = gates[0, : 2 * count]
    mixed = GateNumbers(gates[0], gates[0], first, first, 1e-5, Balance(rounds, 1e-6))
    read_streams_triton(streams, gates, mixed)
    mix_streams_triton(streams, streams[:, 0], gates[:, count:])
    read_streams_triton(streams, alone, GateNumbers(*(alone[0],) * 4, 1e-5))


def launch_slots() -> None:
    """Copies and clears of slots, which know no shape."""
    slab, index = torch.zeros(2, 1 << 16, dtype=torch.uint8), torch.zeros(8, dtype=torch.int64)
    copy_slots_triton(slab, index, index)
    clear_slots_triton(slab, index)


def launch_conv(
    dtype: torch.dtype, dim: int, width: int, has_bias: bool, activates: bool = True
) -> None:
    """A short convolution over a chunk, and over a token of each request."""
    index, x = torch.zeros(8, dtype=torch.int64), torch.zeros(128, dim, dtype=dtype)
    weight = torch.zeros(dim, width, dtype=dtype)
    bias = torch.zeros(dim, dtype=dtype) if has_bias else None
    conv = torch.zeros(9, dim, width - 1, dtype=dtype), weight, bias
    causal_conv_prefill_triton(x, *conv, ((0, 128),), index[:1], (), activates)
    causal_conv_decode_triton(x[:8], *conv, index, index, activates)


def launch_attention(
    dtype: torch.dtype, heads: tuple[int, int], head_dim: int, has_sinks: bool, cap: float
) -> None:
    """Writing, decode and prefill; `heads` are those of queries and of keys."""
    index, table = torch.zeros(8, dtype=torch.int64), torch.zeros(8, 32, dtype=torch.int64)
    q = torch.zeros(8, heads[0], head_dim, dtype=dtype)
    pages = torch.zeros(4, heads[1], 64, head_dim, dtype=dtype)
    rows = torch.zeros(8, heads[1], head_dim, dtype=dtype)
    write_kv_triton(pages, pages, rows, rows, table, index, index)
    seen = (0.1, 0, torch.zeros(heads[0]) if has_sinks else None, cap)
    paged_attention_decode_triton(q, pages, pages, table, index, *seen)
    paged_attention_prefill_triton(q, pages, pages, table[:1], ((0, 8),), *seen)


def launch_coded_attention(
    dtype: torch.dtype, heads: tuple[int, int], head_dim: int, has_sinks: bool, cap: float
) -> None:
    """As `launch_attention`, to pages of e4m3 codes and their scales: in bfloat16 alone."""
    if dtype != torch.bfloat16:
        return
    index, table = torch.zeros(8, dtype=torch.int64), torch.zeros(8, 32, dtype=torch.int64)
    q = torch.zeros(8, heads[0], head_dim, dtype=dtype)
    pages = torch.zeros(4, heads[1], 64, head_dim, dtype=torch.uint8)
    rows, scales = pages[:, :, 0].repeat(2, 1, 1), torch.zeros(4, heads[1], 64)
    write_kv_triton(pages, pages, rows, rows, table, index, index)
    each = rows[:, :, :1].float()
    write_kv_triton(scales[..., None], scales[..., None], each, each, table, index, index)
    seen = (0.1, 0, torch.zeros(heads[0]) if has_sinks else None, cap, (scales, scales))
    paged_attention_decode_triton(q, pages, pages, table, index, *seen)
    paged_attention_prefill_triton(q, pages, pages, table[:1], ((0, 8),), *seen)


def launch_split_attention(dtype: torch.dtype, heads: tuple[int, int], head_dim: int) -> None:
    """Attention in one order of sums, to numbers and to codes."""
    index, table = torch.zeros(8, dtype=torch.int64), torch.zeros(8, 32, dtype=torch.int64)
    q = torch.zeros(8, heads[0], head_dim, dtype=dtype)
    pages = torch.zeros(4, heads[1], 64, head_dim, dtype=dtype)
    split_decode_triton(q, pages, pages, table, index, 0.1, 0)
    split_prefill_triton(q, pages, pages, table[:1], ((0, 8),), 0.1, 0)
    if dtype == torch.bfloat16:
        codes, scales = pages.to(torch.uint8), torch.zeros(4, heads[1], 64)
        split_decode_triton(q, codes, codes, table, index, 0.1, 0, None, 0.0, (scales, scales))


def launch_profiled_attention(
    dtype: torch.dtype, heads: tuple[int, int], head_dim: int, extent: int
) -> None:
    """Attention with profiles of distance, which has the one order of sums alone."""
    index, table = torch.zeros(8, dtype=torch.int64), torch.zeros(8, 32, dtype=torch.int64)
    q = torch.zeros(8, heads[0], head_dim, dtype=dtype)
    pages = torch.zeros(4, heads[1], 64, head_dim, dtype=dtype)
    profiles = torch.zeros(8, heads[0], extent, dtype=dtype)
    split_decode_triton(q, pages, pages, table, index, 0.1, 0, profiles=profiles)
    span = ((0, 8),)
    split_prefill_triton(q, pages, pages, table[:1], span, 0.1, 0, profiles=profiles)


def launch_rotation(
    dtype: torch.dtype, heads: tuple[int, int], head_dim: int, rotary_dim: int
) -> None:
    """The rotation of queries and keys."""
    q, k = (torch.zeros(8, each, head_dim, dtype=dtype) for each in heads)
    index = torch.zeros(8, dtype=torch.int64)
    apply_rotary_triton(q, k, index, torch.zeros(rotary_dim // 2))


def launch_heads_into_pages(
    dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int], rotary_dim: int,
    has_norms: bool = True, has_value_norm: bool = False,
) -> None:  # fmt: skip
    """Norms, rotation and pages of heads; `dims` are those of a head's key and of its value."""
    index, table = torch.zeros(8, dtype=torch.int64), torch.zeros(8, 32, dtype=torch.int64)
    q, k = (torch.zeros(8, count, dims[0], dtype=dtype) for count in heads)
    pages = torch.zeros(4, heads[1], 64, dims[0], dtype=dtype)
    weight = torch.zeros(dims[0])
    norms = HeadNorms(weight, weight, weight if has_value_norm else None, 1e-5)
    turn = HeadTurn(norms if has_norms else None, torch.zeros(rotary_dim // 2), 1.0)
    given = ProjectedHeads(q, k, torch.zeros(8, heads[1], dims[1], dtype=dtype))
    heads_into_pages(given, turn, pages, pages, TokenPlaces(table, index, index))


def launch_latents(
    dtype: torch.dtype, heads: int, latent_dim: int, rope_dim: int, has_sinks: bool
) -> None:
    """Attention to latents at chosen places."""
    index, table = torch.zeros(8, dtype=torch.int64), torch.zeros(8, 32, dtype=torch.int64)
    row_dim = latent_dim + rope_dim
    pages = torch.zeros(4, 64, row_dim, dtype=dtype)
    write_latents_triton(pages, pages[0, :8], table, index, index)
    places = torch.zeros(8, 2048, dtype=torch.int64)
    q = torch.zeros(8, heads, row_dim, dtype=dtype)
    sinks = torch.zeros(heads) if has_sinks else None
    latent_attention_triton(q, pages, places, latent_dim, 0.1, sinks)


def launch_index(dtype: torch.dtype, heads: int, head_dim: int) -> None:
    """The scores of sparse attention's index."""
    index, table = torch.zeros(8, dtype=torch.int64), torch.zeros(8, 32, dtype=torch.int64)
    pages, q = torch.zeros(4, 64, head_dim, dtype=dtype), torch.zeros(8, heads, head_dim)
    q = q.to(dtype)
    write_latents_triton(pages, pages[0, :8], table, index, index)
    index_scores_triton(q, q[:, :, 0], pages, table, index, index)


def launch_joined_rows(dtype: torch.dtype, heads: int, dim: int) -> None:
    """Attention to rows of two pools, which are keys and values, with sinks."""
    slabs = torch.zeros(2, 4, 64 * dim, dtype=dtype)
    near, far = (slab.view(4, 64, dim) for slab in slabs)
    lists = (torch.zeros(8, count, dtype=torch.int64) for count in (128, 512))
    pools = (PlacedRows(pages, places) for pages, places in zip((near, far), lists, strict=True))
    joined = joined_rows(*pools)
    q, sinks = torch.zeros(8, heads, dim, dtype=dtype), torch.zeros(heads)
    latent_attention_triton(q, *joined, dim, 0.1, sinks)


def launch_block_index(dtype: torch.dtype, heads: int, head_dim: int, length: int) -> None:
    """The scores of blocks of block-sparse attention's index."""
    index, table = torch.zeros(8, dtype=torch.int64), torch.zeros(8, 32, dtype=torch.int64)
    pages, q = torch.zeros(4, 64, head_dim, dtype=dtype), torch.zeros(8, heads, head_dim)
    write_latents_triton(pages, pages[0, :8], table, index, index)
    block_scores_triton(q.to(dtype), pages, table, index, index, length)


def launch_mean_index(dtype: torch.dtype, heads: int, head_dim: int, length: int) -> None:
    """The keys of blocks, and their scores."""
    index, table = torch.zeros(8, dtype=torch.int64), torch.zeros(8, 32, dtype=torch.int64)
    pages, q = torch.zeros(4, 64, head_dim, dtype=dtype), torch.zeros(8, heads, head_dim)
    write_latents_triton(pages, pages[0, :8], table, index, index)
    block_means_triton(pages, table, index, index, length)
    index_scores_triton(q.to(dtype), q[:, :, 0], pages, table, index, index, length)


def launch_mamba_step(
    dtype: torch.dtype, heads: int, head_dim: int, groups: int, state: int,
    dt_limit: tuple[float, float],
) -> None:  # fmt: skip
    """The step of a Mamba-2 layer from its raw dt, whose bounds the kernel knows."""
    states, A = torch.zeros(2, heads, head_dim, state), torch.zeros(heads)
    x, dt = (torch.zeros(8, heads, *more, dtype=dtype) for more in ((head_dim,), ()))
    B, index = torch.zeros(8, groups, state, dtype=dtype), torch.zeros(8, dtype=torch.int64)
    raw_state_update_triton((states, x, dt, A, B, B, A), A, dt_limit, index, index)


def launch_mamba(dtype: torch.dtype, heads: int, head_dim: int, groups: int, state: int) -> None:
    """The scan of a Mamba-2 or a lightning layer, and the step from a finished dt."""
    states, A = torch.zeros(2, heads, head_dim, state), torch.zeros(heads)
    x, dt = torch.zeros(128, heads, head_dim, dtype=dtype), torch.zeros(128, heads)
    B, index = torch.zeros(128, groups, state, dtype=dtype), torch.zeros(8, dtype=torch.int64)
    selective_state_update_triton(states, x[:8], dt[:8], A, B[:8], B[:8], A, index, index)
    chunk_scan_triton(x, dt, A, B, B, A, states, ((0, 128),), index[:1], (), 64)
    ssd_runs_triton((x, dt, A, B, B, A), states, torch.zeros(2, 5, dtype=torch.int64), x)


def launch_mamba1(dtype: torch.dtype, inner_dim: int, state_dim: int) -> None:
    """The scan of a Mamba-1 layer, which is its step too."""
    x, B = torch.zeros(128, inner_dim, dtype=dtype), torch.zeros(128, state_dim, dtype=dtype)
    dt, A, D = (
        torch.zeros(128, inner_dim),
        torch.zeros(inner_dim, state_dim),
        torch.zeros(inner_dim),
    )
    runs, states = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, inner_dim, state_dim)
    selective_runs_triton((x, dt, A, B, B, D), states, runs, torch.zeros(128, inner_dim))


def launch_rg_lru(dtype: torch.dtype, dim: int) -> None:
    """The scan of an RG-LRU, which is its step too."""
    x, rates, y = torch.zeros(128, dim, dtype=dtype), torch.zeros(dim), torch.zeros(128, dim)
    runs, states = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, dim)
    positions = torch.zeros(128, dtype=torch.int64)
    rg_lru_runs_triton((x, x, x, rates, positions), states, runs, y)


def launch_mlstm(
    dtype: torch.dtype, heads: int, k_dim: int, v_dim: int, cap: float, eps: float
) -> None:
    """The scan of a matrix LSTM, which is its step too."""
    keys, values = (torch.zeros(64, heads, dim, dtype=dtype) for dim in (k_dim, v_dim))
    gates = CellGates(keys[:, :, 0], keys[:, :, 0], cap, eps)
    matrix, norm = torch.zeros(2, heads, v_dim, k_dim), torch.zeros(2, heads, k_dim + 1)
    runs = torch.zeros(2, 5, dtype=torch.int64)
    mlstm_runs_triton(CellRows(keys, keys, values), gates, matrix, norm, runs, values)


def launch_wkv(dtype: torch.dtype, dim: int) -> None:
    """The scan of RWKV-4, which is its step too."""
    x, rates, y = torch.zeros(128, dim, dtype=dtype), torch.zeros(dim), torch.zeros(128, dim)
    rows = WeightedRows(x, x, torch.zeros(128, dtype=torch.int64), rates, rates)
    wkv_runs_triton(rows, torch.zeros(2, 3, dim), torch.zeros(2, 5, dtype=torch.int64), y)


def launch_block_means(dtype: torch.dtype, dim: int, block_len: int, series: int) -> None:
    """The scan of means of blocks, which is its step too."""
    x, y = torch.zeros(128, series * dim, dtype=dtype), torch.zeros(128, dim)
    bias, index = torch.zeros(block_len, series * dim), torch.zeros(128, dtype=torch.int64)
    states, runs = torch.zeros(2, 3 * series, dim), torch.zeros(2, 5, dtype=torch.int64)
    block_mean_runs_triton(BlockedRows(x, x, index, bias), states, runs, y)


def launch_delta_rule(dtype: torch.dtype, heads: tuple[int, int], k_dim: int, v_dim: int) -> None:
    """The scan and the step of a gated delta net; `heads` are those of keys and of values."""
    q = torch.zeros(128, heads[0], k_dim, dtype=dtype)
    v, rates = torch.zeros(128, heads[1], v_dim, dtype=dtype), torch.zeros(128, heads[1])
    states, index = torch.zeros(2, heads[1], k_dim, v_dim), torch.zeros(8, dtype=torch.int64)
    keys, scales = q.flatten(1).repeat(1, 2), torch.zeros(heads[1])
    steps = torch.zeros(128, heads[1], dtype=dtype)
    delta_inputs(keys, steps, steps, torch.zeros(k_dim), scales, scales, 1.0, 1e-6)
    delta_decode_triton(states, q[:8], q[:8], v[:8], rates[:8], rates[:8], index, index)
    delta_chunk_scan_triton(
        q.float(), q.float(), v, rates, rates, states, ((0, 128),), index[:1], (), 64
    )
    runs = torch.zeros(2, 5, dtype=torch.int64)
    delta_runs_triton((q.float(), q.float(), v, rates, rates), states, runs, v)


def launch_kimi_delta(dtype: torch.dtype, heads: int, head_dim: int) -> None:
    """The scan of a Kimi Delta layer, which is its step too."""
    keys, v = torch.zeros(64, heads, head_dim), torch.zeros(64, heads, head_dim, dtype=dtype)
    given = keys, keys, v, keys, torch.zeros(64, heads)
    states = torch.zeros(2, heads, head_dim, head_dim)
    runs = torch.zeros(2, 5, dtype=torch.int64)
    delta_runs_triton(given, states, runs, torch.zeros(64, heads, head_dim))


def launch_choice(dtype: torch.dtype, num_experts: int, per_token: int) -> None:
    """The choice of a token's experts by their scores, and by ranks with a bias."""
    scores, bias = torch.zeros(8, num_experts, dtype=dtype), torch.zeros(num_experts)
    for measure in Measure:
        rule = ExpertRule(per_token, measure)
        choose_experts_triton(scores, rule, NO_NUMBERS, dtype)
    for measure in Measure:
        if measure is Measure.SOFTMAX_OF_CHOSEN:
            continue
        rule = ExpertRule(per_token, measure, sum=ShareSum(added=1e-20))
        choose_experts_triton(scores.float(), rule, ExpertNumbers(bias), dtype)
    if per_token == 2:
        choose_one_by_one_triton(scores, 0.01, dtype)


def launch_look_up(dtype: torch.dtype, num_experts: int, per_token: int) -> None:
    """The choice of a token's experts by a table of token ids."""
    ids, table = torch.zeros(8, dtype=torch.int64), torch.zeros(9, per_token, dtype=torch.int64)
    rule = ExpertRule(per_token, Measure.SQRT_SOFTPLUS, sum=ShareSum(added=1e-20), scaling=1.5)
    look_up_experts_triton(torch.zeros(8, num_experts), ids, table, rule, dtype)


def launch_choice_of_groups(
    dtype: torch.dtype, num_experts: int, per_token: int, groups: int, groups_per_token: int
) -> None:
    """The choice of a token's experts within the best groups, by their best expert or best two."""
    scores, bias = torch.zeros(8, num_experts), torch.zeros(num_experts)
    by_one = ExpertGroups(groups, groups_per_token)
    rule = ExpertRule(per_token, Measure.SOFTMAX, by_one)
    choose_experts_triton(scores, rule, NO_NUMBERS, dtype)
    by_two = ExpertGroups(groups, groups_per_token, 2)
    rule = ExpertRule(per_token, Measure.SIGMOID, by_two, ShareSum(added=1e-20), 2.5)
    choose_experts_triton(scores, rule, ExpertNumbers(bias), dtype)


def launch_experts(dtype: torch.dtype, num_experts: int, in_dim: int, out_dim: int) -> None:
    """The order of few pairs, and one product of all experts, of few, many and most pairs: in
    floats, in FP8 and four bits by blocks, and in MXFP4 with a bias (gpt-oss)."""
    sort_pairs_triton(torch.zeros(8, 4, dtype=torch.int64), num_experts)
    starts = torch.zeros(num_experts + 1, dtype=torch.int64)
    weight = torch.empty(num_experts, out_dim, in_dim, dtype=dtype, device="meta")
    bias = torch.empty(num_experts, out_dim, dtype=dtype, device="meta")

    def codes(columns: int) -> Tensor:
        return torch.empty(num_experts, out_dim, columns, dtype=torch.uint8, device="meta")

    def scaled(length: int, dtype: torch.dtype, zeros: bool = False) -> Any:
        scales = torch.empty(num_experts, out_dim, -(-in_dim // length), device="meta")
        groups = torch.empty(num_experts, in_dim, dtype=torch.int32, device="meta")
        return scales.to(dtype), scales.to(torch.int8) if zeros else None, groups, length

    for pairs in (each * num_experts for each in PAIRS_PER_EXPERT):
        x = torch.zeros(pairs, in_dim, dtype=dtype, device="meta")
        routed = torch.zeros(pairs, dtype=torch.int64), starts
        grouped_floats_triton(x, weight, None, *routed)
        grouped_floats_triton(x, weight, bias, *routed)
        fp8, four = (codes(in_dim), FP8), codes(in_dim // 2)
        grouped_codes_triton(x, fp8, scaled(BLOCK, torch.float32), None, *routed)
        if in_dim % 2:  # a byte holds two codes of one row
            continue
        grouped_codes_triton(x, (four, INT4), scaled(BLOCK, dtype, zeros=True), None, *routed)
        grouped_codes_triton(x, (four, FP4), scaled(32, torch.uint8), bias, *routed)


def launch_dense(dtype: torch.dtype, in_dim: int, out_dim: int) -> None:
    """The product with one weight, in one order of sums: of few rows, and of many."""
    weight = torch.empty(out_dim, in_dim, dtype=dtype, device="meta")
    for bias in (None, weight[:, 0].contiguous()):
        for rows in (8, 300):
            x = torch.zeros(rows, in_dim, dtype=dtype, device="meta")
            small_dense_product(x, weight, bias)
        if dtype is torch.bfloat16 and in_dim % 8 == 0:  # rows of whole 16 bytes
            large_dense_product(x, weight, bias)


def launch_experts_in_one_order(
    dtype: torch.dtype, num_experts: int, in_dim: int, out_dim: int
) -> None:
    """One product of all experts by the tiles of any number of pairs."""
    starts, order = torch.zeros(num_experts + 1, dtype=torch.int64), torch.zeros(8).long()
    weight = torch.empty(num_experts, out_dim, in_dim, dtype=dtype, device="meta")
    x = torch.zeros(8, in_dim, dtype=dtype, device="meta")
    grouped_floats_triton(x, weight, None, order, starts, tiles_of_any(x, ANY_ROWS))


def launch_weighted_sum(dtype: torch.dtype, per_token: int, dim: int) -> None:
    """The sum of a token's experts."""
    x, shares = torch.zeros(8, per_token, dim, dtype=dtype), torch.zeros(8, per_token, dtype=dtype)
    weighted_sum_triton(x, shares)


def launch_draws(dtype: torch.dtype, vocab: int) -> None:
    """The likeliest token, one that is drawn, and penalties on earlier ones."""
    logits, real = torch.zeros(2, vocab, dtype=dtype), torch.ones(2, dtype=torch.float64)
    tokens = finite_argmax_triton(logits, -1)
    draw_rows_triton_(tokens, logits, DrawnRows(tokens, real, real, tokens, real, real), -1)
    past = EarlierTokens(torch.zeros(2, 64, dtype=torch.int32), tokens, tokens)
    penalise_triton(logits, past, PenaltyStrengths(real, real, real))


def launch_all(dtype: torch.dtype) -> None:
    """Launches everything once, in the shapes of a Granite 4 H layer and of other families."""
    launch_norms(dtype, 2048)
    launch_residual(dtype, 2048, 0.22)
    launch_gated_norm(dtype, 4096, 1)
    launch_activation(dtype, 8192)
    launch_gated_sum(dtype, 2048)
    launch_clamped_activation(dtype, 2880, 1.702, 7.0, 1.0)
    launch_clamped_activation(dtype, 2048, 1.0, 10.0, 0.0)
    launch_limited_activation(dtype, 1280, 7.0)
    launch_streams(dtype, 4, 6144)
    launch_gated_streams(dtype, 4, 2560)
    launch_keyed_value(dtype, 4, 2560)
    launch_rotation(dtype, (32, 8), 128, 128)
    launch_heads_into_pages(dtype, (32, 8), (128, 128), 128)
    launch_heads_into_pages(dtype, (32, 8), (128, 128), 128, has_norms=False)
    launch_slots()
    launch_draws(dtype, 100_352)
    launch_conv(dtype, 4352, 4, has_bias=True)
    launch_mamba(dtype, 64, 64, 1, 128)
    launch_mamba_step(dtype, 64, 64, 1, 128, (0.0, float("inf")))
    launch_mamba1(dtype, 8192, 16)
    launch_rg_lru(dtype, 2560)
    launch_mlstm(dtype, 8, 256, 512, 15.0, 1e-6)
    launch_wkv(dtype, 2560)
    launch_block_means(dtype, 512, 128, 1)
    launch_block_means(dtype, 640, 4, 2)
    launch_attention(dtype, (32, 8), 128, has_sinks=False, cap=0.0)
    launch_attention(dtype, (32, 8), 128, has_sinks=True, cap=0.0)
    launch_attention(dtype, (32, 8), 128, has_sinks=False, cap=50.0)
    launch_coded_attention(dtype, (32, 8), 128, has_sinks=False, cap=0.0)
    launch_delta_rule(dtype, (16, 32), 128, 128)
    launch_latents(dtype, 128, 512, 64, has_sinks=False)
    launch_latents(dtype, 64, 512, 64, has_sinks=True)
    launch_joined_rows(dtype, 64, 512)
    launch_index(dtype, 64, 128)
    launch_block_index(dtype, 4, 128, 128)
    launch_mean_index(dtype, 4, 128, 4)
    launch_experts(dtype, 32, 2880, 5760)
    launch_kimi_delta(dtype, 32, 128)
    launch_split_attention(dtype, (32, 8), 128)
    launch_profiled_attention(dtype, (64, 8), 128, 1024)
    launch_dense(dtype, 2048, 8192)
    launch_dense(dtype, 2048, 100_352)
    launch_experts_in_one_order(dtype, 32, 2880, 5760)
    launch_weighted_sum(dtype, 4, 2880)
    launch_choice(dtype, 16, 2)
    launch_choice(dtype, 512, 10)
    launch_choice_of_groups(dtype, 160, 6, 8, 3)
    launch_choice_of_groups(dtype, 256, 8, 8, 4)


def launch_wide(dtype: torch.dtype) -> None:
    """The largest tiles: states of 128 × 256 (Falcon-H1), heads of 256 and 512 (Gemma, Gemma 4)."""
    launch_mamba(dtype, 24, 128, 1, 256)
    launch_mamba_step(dtype, 24, 128, 1, 256, (0.001, 0.1))
    launch_split_attention(dtype, (8, 4), 256)
    launch_split_attention(dtype, (16, 2), 512)
    launch_attention(dtype, (8, 4), 256, has_sinks=False, cap=0.0)
    launch_attention(dtype, (16, 2), 512, has_sinks=False, cap=0.0)
    launch_heads_into_pages(dtype, (16, 2), (512, 512), 128, has_value_norm=True)
