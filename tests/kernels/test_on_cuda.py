"""The public ops on a real GPU, at real sizes, against their references in float64 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
import triton
from torch import Tensor

from ferryman.model.sampling.inverse_cdf import Filters
from ferryman.model.sampling.sampler import sample_if_finite
from ferryman_kernels.attention.latent_attention import (
    latent_attention,
    latent_attention_prefill,
    latent_attention_reference,
)
from ferryman_kernels.attention.latent_pages import write_latents, write_latents_reference
from ferryman_kernels.attention.paged_attention import (
    paged_attention_decode,
    paged_attention_prefill,
    paged_attention_reference,
)
from ferryman_kernels.attention.pages import (
    gather_pages,
    scatter_pages,
    write_kv,
    write_kv_reference,
)
from ferryman_kernels.attention.sparse_index import choose_decode, index_scores_reference
from ferryman_kernels.elementwise.expert_choice import (
    ExpertGroups,
    ExpertNumbers,
    ExpertRule,
    Measure,
    ShareSum,
    choose_experts,
)
from ferryman_kernels.elementwise.rms_norm import gated_rms_norm, gated_rms_norm_reference
from ferryman_kernels.elementwise.rotary import apply_rotary, apply_rotary_reference
from ferryman_kernels.products._dense_product_triton import small_dense_product, tiles_agree
from ferryman_kernels.products.dense_product import dense_product
from ferryman_kernels.products.grouped_product import (
    FP4,
    CodeStack,
    FloatStack,
    grouped_product,
    sort_pairs,
)
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
from ferryman_kernels.recurrence.delta_decode import delta_decode, delta_decode_reference
from ferryman_kernels.recurrence.ssd_chunk_scan import chunk_scan, chunk_scan_reference
from ferryman_kernels.recurrence.ssd_decode import (
    selective_state_update,
    selective_state_update_reference,
)
from ferryman_kernels.slots import clear_slots, copy_slots

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

T = TypeVar("T")
CUDA = torch.device("cuda")
DTYPES = [torch.float32, torch.bfloat16]
SPANS = ((0, 700), (128, 333), (64, 65), (1024, 2000))


def _rounded(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def _on_cuda(op: Callable[..., T], *args: Any) -> T:
    """Runs on the card; an operation that waits for it is an error."""
    moved = [arg.to(CUDA) if isinstance(arg, Tensor) else arg for arg in args]
    torch.cuda.set_sync_debug_mode("error")
    try:
        return op(*moved)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _in_float64(op: Callable[..., T], *args: Any) -> T:
    """Runs in float64, with the states too, because the op writes them in place."""
    return op(*(arg.double() if _is_floating(arg) else arg for arg in args))


def _is_floating(arg: object) -> bool:
    return isinstance(arg, Tensor) and arg.is_floating_point()


def _assert_near(got: Tensor, expected: Tensor, *, bfloat16: bool) -> None:
    """‖got - expected‖ / ‖expected‖ is within the precision of the narrowest dtype used."""
    error = (got.cpu().double() - expected.double()).norm() / expected.double().norm()
    assert float(error) < (6e-3 if bfloat16 else 5e-6), float(error)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_and_rotary_on_the_device(dtype: torch.dtype) -> None:
    x, gate, weight = (_rounded(*s, dtype=dtype) for s in ((300, 3072), (300, 3072), (3072,)))
    got = _on_cuda(gated_rms_norm, x, gate, weight, 1e-5, 4)
    expected = _in_float64(gated_rms_norm_reference, x, gate, weight, 1e-5, 4)
    _assert_near(got, expected, bfloat16=dtype == torch.bfloat16)
    q, k = _rounded(300, 12, 128, dtype=dtype), _rounded(300, 4, 128, dtype=dtype)
    positions = torch.randint(0, 4096, (300,))
    inv_freq = 10000.0 ** (-torch.arange(64) / 64)
    turned = _on_cuda(apply_rotary, q, k, positions, inv_freq)
    straight = _in_float64(apply_rotary_reference, q, k, positions, inv_freq)
    for a, b in zip(turned, straight, strict=True):
        error = (a.cpu().double() - b).norm() / b.norm()
        assert float(error) < (6e-3 if dtype == torch.bfloat16 else 1e-4)  # float32 angles


@pytest.mark.parametrize("dtype", DTYPES)
def test_convolution_on_the_device(dtype: torch.dtype) -> None:
    tokens = sum(end - start for start, end in SPANS)
    x, weight, bias = (_rounded(*s, dtype=dtype) for s in ((tokens, 3328), (3328, 4), (3328,)))
    states, slots = _rounded(9, 3328, 3, dtype=dtype), torch.tensor([4, 0, 7, 2])
    snapshots = ((0, 64, 1), (3, 1984, 5))
    moved = states.to(CUDA)
    got = _on_cuda(causal_conv_prefill, x, moved, weight, bias, SPANS, slots, snapshots)
    wide = states.double()
    expected = _in_float64(
        causal_conv_prefill_reference, x, wide, weight, bias, SPANS, slots, snapshots
    )
    _assert_near(got, expected, bfloat16=dtype == torch.bfloat16)
    assert torch.equal(moved.cpu().double(), wide)
    step, into = _rounded(4, 3328, dtype=dtype), torch.tensor([4, 3, -1, 2])
    got = _on_cuda(causal_conv_decode, step, moved, weight, bias, slots, into)
    expected = _in_float64(causal_conv_decode_reference, step, wide, weight, bias, slots, into)
    _assert_near(got, expected, bfloat16=dtype == torch.bfloat16)
    assert torch.equal(moved.cpu().double(), wide)


def _scan_inputs(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    return [
        _rounded(tokens, 24, 64, dtype=dtype),
        torch.rand(tokens, 24),
        -torch.rand(24) * 4,
        _rounded(tokens, 1, 128, dtype=dtype),
        _rounded(tokens, 1, 128, dtype=dtype),
        torch.randn(24),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_len", [16, 64, 128])
def test_scan_on_the_device(dtype: torch.dtype, chunk_len: int) -> None:
    inputs = _scan_inputs(sum(end - start for start, end in SPANS), dtype)
    states, slots = torch.randn(9, 24, 64, 128), torch.tensor([4, 0, 7, 2])
    snapshots = ((0, 128, 1), (3, 1920, 5))
    moved = states.to(CUDA)
    got = _on_cuda(chunk_scan, *inputs, moved, SPANS, slots, snapshots, chunk_len)
    wide = states.double()
    expected = _in_float64(chunk_scan_reference, *inputs, wide, SPANS, slots, snapshots, chunk_len)
    _assert_near(got, expected, bfloat16=dtype == torch.bfloat16)
    _assert_near(moved, wide, bfloat16=False)


def test_resuming_on_the_grid_has_the_bits_of_the_cold_run_on_the_device() -> None:
    inputs, slot = _scan_inputs(1000, torch.bfloat16), torch.tensor([0])
    cold = torch.zeros(1, 24, 64, 128, device=CUDA)
    y = _on_cuda(chunk_scan, *inputs, cold, ((0, 1000),), slot, (), 64)
    for cut in (64, 512, 960):
        states, parts = torch.zeros_like(cold), []
        for low, high in ((0, cut), (cut, 1000)):
            x, dt, A, B, C, D = inputs
            part = (x[low:high], dt[low:high], A, B[low:high], C[low:high], D)
            parts.append(_on_cuda(chunk_scan, *part, states, ((low, high),), slot, (), 64))
        assert torch.equal(torch.cat(parts), y)
        assert torch.equal(states, cold)


@pytest.mark.parametrize("dtype", DTYPES)
def test_state_update_on_the_device(dtype: torch.dtype) -> None:
    inputs = _scan_inputs(33, dtype)
    states = torch.randn(80, 24, 64, 128)
    slots = torch.randperm(40)[:33]
    into = torch.where(torch.arange(33) % 2 == 0, slots, slots + 40)
    slots[5] = into[7] = -1
    moved = states.to(CUDA)
    got = _on_cuda(selective_state_update, moved, *inputs, slots, into)
    wide = states.double()
    expected = _in_float64(selective_state_update_reference, wide, *inputs, slots, into)
    _assert_near(got, expected, bfloat16=dtype == torch.bfloat16)
    _assert_near(moved, wide, bfloat16=False)


def _delta_inputs(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    q, k = torch.nn.functional.normalize(torch.randn(2, tokens, 16, 128), dim=-1)
    rates = -torch.rand(tokens, 32), torch.rand(tokens, 32)
    return [q, k, _rounded(tokens, 32, 128, dtype=dtype), *rates]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_len", [16, 64])
def test_delta_rule_on_the_device(dtype: torch.dtype, chunk_len: int) -> None:
    inputs = _delta_inputs(sum(end - start for start, end in SPANS), dtype)
    states, slots = torch.randn(9, 32, 128, 128), torch.tensor([4, 0, 7, 2])
    snapshots = ((0, 128, 1), (3, 1920, 5))
    moved = states.to(CUDA)
    got = _on_cuda(delta_chunk_scan, *inputs, moved, SPANS, slots, snapshots, chunk_len)
    truth = states.double()
    expected = _in_float64(
        delta_chunk_scan_reference, *inputs, truth, SPANS, slots, snapshots, chunk_len
    )
    _assert_near(got, expected, bfloat16=dtype == torch.bfloat16)
    _assert_near(moved, truth, bfloat16=False)
    step, into = [tensor[:4] for tensor in inputs], torch.tensor([4, 3, 6, 2])
    got = _on_cuda(delta_decode, moved, *step, slots, into)
    expected = _in_float64(delta_decode_reference, truth, *step, slots, into)
    _assert_near(got, expected, bfloat16=dtype == torch.bfloat16)
    _assert_near(moved, truth, bfloat16=False)


def test_resuming_the_delta_rule_has_the_bits_of_the_cold_run_on_the_device() -> None:
    inputs, slot = _delta_inputs(700, torch.bfloat16), torch.tensor([0])
    cold = torch.zeros(1, 32, 128, 128, device=CUDA)
    y = _on_cuda(delta_chunk_scan, *inputs, cold, ((0, 700),), slot, (), 64)
    for cut in (64, 384, 640):
        states, parts = torch.zeros_like(cold), []
        for low, high in ((0, cut), (cut, 700)):
            part = [tensor[low:high] for tensor in inputs]
            parts.append(_on_cuda(delta_chunk_scan, *part, states, ((low, high),), slot, (), 64))
        assert torch.equal(torch.cat(parts), y)
        assert torch.equal(states, cold)


@pytest.mark.parametrize("has_sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("cap", [0.0, 5.0], ids=["no cap", "cap"])
@pytest.mark.parametrize("window", [0, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_on_the_device(
    dtype: torch.dtype, window: int, cap: float, has_sinks: bool
) -> None:
    keys, values = _rounded(2, 300, 4, 16, 128, dtype=dtype)
    table = torch.randperm(300)[: 2 * 125].view(2, 125)
    table = torch.cat((table, table))  # several requests read shared prefixes
    tokens = sum(end - start for start, end in SPANS)
    q = _rounded(tokens, 12, 128, dtype=dtype)
    pages = (keys, values, table)
    seen = (0.09, window, torch.randn(12) * 3 if has_sinks else None, cap)
    got = _on_cuda(paged_attention_prefill, q, *pages, SPANS, *seen)
    expected = _in_float64(paged_attention_reference, q, *pages, SPANS, *seen)
    _assert_near(got, expected, bfloat16=dtype == torch.bfloat16)
    positions = torch.tensor([0, 1999, 511, 512])
    got = _on_cuda(paged_attention_decode, q[:4], *pages, positions, *seen)
    spans = [(position, position + 1) for position in positions.tolist()]
    expected = _in_float64(paged_attention_reference, q[:4], *pages, spans, *seen)
    _assert_near(got, expected, bfloat16=dtype == torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_attention_on_the_device(dtype: torch.dtype) -> None:
    """The device chooses by rounded scores: a choice may be worse by a rounding error only."""
    pages, index_pages = (_rounded(300, 16, dim, dtype=dtype) for dim in (576, 128))
    table = torch.randperm(300)[: 2 * 125].view(2, 125)[[0, 1, 0, 1]]
    positions, rows = torch.tensor([0, 1999, 511, 512]), torch.arange(4)
    q, index_q = (_rounded(4, *s, dtype=dtype) * 0.1 for s in ((128, 576), (64, 128)))
    weights = torch.randn(4, 64)
    index = (index_q, weights, index_pages, table)
    places = _on_cuda(choose_decode, *index, positions, 300).cpu()
    scores = _in_float64(index_scores_reference, *index, rows, positions)
    for token, position in enumerate(positions.tolist()):
        line, seen = scores[token, : position + 1], min(300, position + 1)
        where = table[token].repeat_interleave(16) * 16 + torch.arange(2000) % 16
        chosen = torch.isin(where[: position + 1], places[token])
        assert int(chosen.sum()) == seen
        slack = 1e-2 if dtype == torch.bfloat16 else 1e-4
        assert float(line[chosen].min()) > float(line.topk(seen).values[-1]) - slack
    got = _on_cuda(latent_attention, q, pages, places, 512, 0.09)
    expected = _in_float64(latent_attention_reference, q, pages, places, 512, 0.09)
    _assert_near(got, expected, bfloat16=dtype == torch.bfloat16)
    written = pages.to(CUDA)
    write_latents(written, *(t.to(CUDA) for t in (q[:, 0], table, rows, positions)))
    write_latents_reference(pages, q[:, 0], table, rows, positions)
    assert torch.equal(written.cpu(), pages)
    tokens = sum(end - start for start, end in SPANS)
    chunk = _rounded(tokens, 8, 576, dtype=dtype) * 0.1
    got = _on_cuda(latent_attention_prefill, chunk, pages, table, SPANS, 512, 0.09)
    expected = _in_float64(latent_attention_prefill, chunk, pages, table, SPANS, 512, 0.09)
    _assert_near(got, expected, bfloat16=dtype == torch.bfloat16)


@pytest.mark.parametrize(
    ("out_dim", "in_dim"), [(2048, 4096), (3072, 2048), (8512, 2048), (96, 200)]
)
def test_a_row_has_its_own_bits_in_every_tile_on_the_device(out_dim: int, in_dim: int) -> None:
    """Large tiles and small ones, parts of a program's own and all in one."""
    x, weight = (torch.randn(num, in_dim, device="cuda").bfloat16() for num in (4096, out_dim))
    whole = dense_product(x, weight, None)
    assert torch.equal(small_dense_product(x, weight, None), whole)
    for rows in (1, 2, 16, 63, 64, 65, 200, 1000, 2048):
        assert torch.equal(dense_product(x[-rows:], weight, None), whole[-rows:]), rows
    assert tiles_agree(torch.device("cuda"))


@pytest.mark.parametrize("pairs_per_token", [1, 4])
@pytest.mark.parametrize("tokens", [3, 700])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_grouped_product_on_the_device(
    dtype: torch.dtype, tokens: int, pairs_per_token: int
) -> None:
    """In floats and in MXFP4, with experts that nothing is routed to."""
    chosen = torch.rand(tokens, 30).topk(pairs_per_token).indices
    order, starts = sort_pairs(chosen, 32)
    x, bias = _rounded(tokens, 320, dtype=dtype), _rounded(32, 200, dtype=dtype)
    codes = torch.randint(0, 256, (32, 200, 160), dtype=torch.uint8)
    powers = torch.randint(120, 130, (32, 200, 10), dtype=torch.uint8)
    groups = (torch.arange(320) // 32).int().repeat(32, 1)
    coded = CodeStack(codes, FP4, powers.view(torch.float8_e8m0fnu), None, groups, 32, bias)
    stacks: list[FloatStack | CodeStack] = [FloatStack(_rounded(32, 200, 320, dtype=dtype), bias)]
    # Triton 3.6 fails in an assertion of its own over float64 made of codes; 3.9 compiles it.
    if dtype != torch.float64 or tuple(map(int, triton.__version__.split(".")[:2])) > (3, 6):
        stacks.append(coded)
    for stack in stacks:
        moved = {name: getattr(stack, name) for name in stack.__slots__}
        moved |= {name: t.to(CUDA) for name, t in moved.items() if isinstance(t, Tensor)}
        on_card = type(stack)(**moved)
        got = _on_cuda(grouped_product, x, on_card, *sort_pairs(chosen.to(CUDA), 32))
        expected = grouped_product(x.double(), stack, order, starts)
        _assert_near(got, expected, bfloat16=dtype == torch.bfloat16)


@pytest.mark.parametrize("tokens", [1, 33, 4096])
def test_experts_are_chosen_on_the_device_as_on_the_processor(tokens: int) -> None:
    groups = ExpertGroups(count=8, per_token=4, best_experts=2)
    rule = ExpertRule(8, Measure.SIGMOID, groups, ShareSum(added=1e-20), 2.5)

    def choose(scores: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return choose_experts(scores, rule, ExpertNumbers(bias), scores.dtype)

    # Where two experts are as good but for a rounding, either may be chosen.
    scores, bias = torch.randn(tokens, 256, dtype=torch.float64), torch.rand(256).double() / 10
    shares, chosen = _on_cuda(choose, scores, bias)
    right_shares, right = choose(scores, bias)
    assert torch.equal(chosen.cpu(), right)
    torch.testing.assert_close(shares.cpu(), right_shares, rtol=1e-13, atol=0)
    rows = scores.float().to(CUDA)
    whole = choose(rows, bias.float().to(CUDA))
    alone = choose(rows[-1:], bias.float().to(CUDA))
    assert all(torch.equal(row[0], among[-1]) for row, among in zip(alone, whole, strict=True))


@pytest.mark.parametrize("rows", [1, 32])
def test_tokens_are_drawn_on_the_device_as_on_the_processor(rows: int) -> None:
    logits = (3 * torch.randn(rows, 100_352)).bfloat16()
    uniforms, top_p = torch.rand(2, rows, dtype=torch.float64)
    some = torch.linspace(0.5, 1.5, rows, dtype=torch.float64)
    top_k = torch.arange(rows) % 3 * 40

    def drawn(logits: Tensor, *numbers: Tensor) -> Tensor:
        return sample_if_finite(logits, Filters(*numbers), -1)

    numbers = torch.arange(rows), uniforms, some, top_k, top_p, some / 1000
    assert _on_cuda(drawn, logits, *numbers).tolist() == drawn(logits, *numbers).tolist()


def test_pages_and_slots_beyond_two_gigabytes_on_the_device() -> None:
    slot_bytes, num_slots = 1 << 20, 5000
    slab = torch.zeros(num_slots, slot_bytes, dtype=torch.uint8, device=CUDA)
    slab[4990] = 7
    copy_slots(slab, torch.tensor([4990], device=CUDA), torch.tensor([4999], device=CUDA))
    assert bool((slab[4999] == 7).all())
    pages = gather_pages(slab, torch.tensor([4999, 3], device=CUDA))
    assert bool((pages[0] == 7).all())
    scatter_pages(slab, torch.tensor([4998, 2], device=CUDA), pages)
    clear_slots(slab, torch.tensor([4990, 4999], device=CUDA))
    assert int(slab.sum()) == 7 * slot_bytes
    assert bool((slab[4998] == 7).all())
    cells = slab.view(torch.float32)[:, :8192].view(num_slots, 4, 16, 128)
    heads = torch.randn(3, 4, 128, device=CUDA)
    table = torch.tensor([[4997, 4996]], device=CUDA)
    where = (table, torch.zeros(3, dtype=torch.int64, device=CUDA))
    write_kv(cells, cells, heads, heads, *where, torch.tensor([0, 16, 31], device=CUDA))
    expected = torch.zeros(2, 4, 16, 128)
    write_kv_reference(
        expected, expected, heads.cpu(), heads.cpu(), torch.tensor([[1, 0]]),
        torch.zeros(3, dtype=torch.int64), torch.tensor([0, 16, 31]),
    )  # fmt: skip
    assert torch.equal(cells[4996:4998].cpu(), expected)
