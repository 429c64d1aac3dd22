"""Times every kernel on this machine against a copy of the same number of bytes.

    python tools/bench_kernels.py            on the GPU if there is one, else on the CPU
    python tools/bench_kernels.py --device cpu --threads 2

The shapes are those of a Granite 4 H layer: on a GPU of about 3 B parameters, on a CPU of about 100
M. `share` is the bandwidth reached (each input read once, each output written once) over that of a
large copy in the same run. A low share of scans and prefill attention shows that arithmetic limits
them, not bytes. Figures are medians; data is random, and states are larger than the caches.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that it runs as a plain script

from tools.card_timer import copy_rate, seconds_on_card

from ferryman_kernels.attention.latent_attention import latent_attention
from ferryman_kernels.attention.latent_pages import write_latents
from ferryman_kernels.attention.paged_attention import (
    paged_attention_decode,
    paged_attention_prefill,
)
from ferryman_kernels.attention.pages import gather_pages, scatter_pages, write_kv
from ferryman_kernels.attention.sparse_index import choose_decode
from ferryman_kernels.elementwise.rms_norm import gated_rms_norm, rms_norm
from ferryman_kernels.elementwise.rotary import apply_rotary
from ferryman_kernels.recurrence.causal_conv import causal_conv_decode, causal_conv_prefill
from ferryman_kernels.recurrence.delta_chunk_scan import delta_chunk_scan
from ferryman_kernels.recurrence.delta_decode import delta_decode
from ferryman_kernels.recurrence.ssd_chunk_scan import chunk_scan
from ferryman_kernels.recurrence.ssd_decode import selective_state_update
from ferryman_kernels.slots import clear_slots, copy_slots


@dataclass(frozen=True)
class KernelShape:
    """One layer, and the amount of work in one call."""

    hidden: int
    ssm_heads: int
    ssm_head_dim: int
    ssm_state: int
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    tokens: int
    requests: int
    context: int
    slots: int

    @property
    def inner(self) -> int:
        return self.ssm_heads * self.ssm_head_dim

    @property
    def conv_dim(self) -> int:
        return self.inner + 2 * self.ssm_state


SHAPES = {
    "cuda": KernelShape(2048, 64, 64, 128, 32, 8, 128, 64, 16384, 256, 4096, 512),
    "cpu": KernelShape(768, 24, 64, 128, 12, 4, 64, 64, 2048, 32, 1024, 64),
}
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class KernelCase:
    """A kernel ready to run, and the fewest bytes it must move."""

    name: str
    run: Callable[[], object]
    num_bytes: int


def bytes_of(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def cases(shape: KernelShape, device: torch.device) -> Iterator[KernelCase]:
    with device:
        yield from row_cases(shape)
        yield from slot_cases(shape)
        yield from mamba_cases(shape)
        yield from delta_cases(shape)
        yield from attention_cases(shape)
        yield from latent_cases(shape)


def row_cases(shape: KernelShape) -> Iterator[KernelCase]:
    x = torch.randn(shape.tokens, shape.hidden).to(DTYPE)
    weight = torch.randn(shape.hidden).to(DTYPE)
    yield KernelCase("rms_norm", lambda: rms_norm(x, weight, 1e-5), 2 * bytes_of(x))
    inner, gate = torch.randn(2, shape.tokens, shape.inner).to(DTYPE)
    scale = torch.randn(shape.inner).to(DTYPE)
    gated = 2 * bytes_of(inner) + bytes_of(gate)
    yield KernelCase("gated_rms_norm", lambda: gated_rms_norm(inner, gate, scale, 1e-5, 1), gated)
    q = torch.randn(shape.tokens, shape.q_heads, shape.head_dim).to(DTYPE)
    k = torch.randn(shape.tokens, shape.kv_heads, shape.head_dim).to(DTYPE)
    positions, inv_freq = torch.arange(shape.tokens), torch.rand(shape.head_dim // 2)
    turned = 2 * bytes_of(q, k)
    yield KernelCase("apply_rotary", lambda: apply_rotary(q, k, positions, inv_freq), turned)


def slot_cases(shape: KernelShape) -> Iterator[KernelCase]:
    slot_bytes = 4 << 20 if shape.hidden > 1024 else 1 << 20
    slab = torch.randint(0, 256, (256, slot_bytes), dtype=torch.uint8)
    order = torch.randperm(256)
    src, dst = order[:128], order[128:]
    yield KernelCase("copy_slots", lambda: copy_slots(slab, src, dst), 2 * 128 * slot_bytes)
    yield KernelCase("clear_slots", lambda: clear_slots(slab, dst), 128 * slot_bytes)
    pages = gather_pages(slab, src)
    yield KernelCase("gather_pages", lambda: gather_pages(slab, src), 2 * bytes_of(pages))
    yield KernelCase("scatter_pages", lambda: scatter_pages(slab, dst, pages), 2 * bytes_of(pages))


def mamba_cases(shape: KernelShape) -> Iterator[KernelCase]:
    conv_weight = torch.randn(shape.conv_dim, 4).to(DTYPE)
    conv_bias = torch.randn(shape.conv_dim).to(DTYPE)
    conv_states = torch.randn(shape.slots, shape.conv_dim, 3).to(DTYPE)
    heads = (shape.ssm_heads, shape.ssm_head_dim)
    ssm_states = torch.randn(shape.slots, *heads, shape.ssm_state)
    A, D = -torch.rand(shape.ssm_heads), torch.randn(shape.ssm_heads)

    def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        x, B, C = (
            torch.randn(tokens, *dims).to(DTYPE) for dims in (heads, *[(1, shape.ssm_state)] * 2)
        )
        conv_x = torch.randn(tokens, shape.conv_dim).to(DTYPE)
        return x, torch.rand(tokens, shape.ssm_heads), B, C, conv_x

    slots = torch.randperm(shape.slots)[: shape.requests]
    x, dt, B, C, conv_x = inputs(shape.requests)
    yield KernelCase(
        f"causal_conv_decode · {shape.requests} requests",
        lambda: causal_conv_decode(conv_x, conv_states, conv_weight, conv_bias, slots, slots),
        2 * bytes_of(conv_x) + 2 * bytes_of(conv_states[: shape.requests]),
    )
    yield KernelCase(
        f"selective_state_update · {shape.requests} requests",
        lambda: selective_state_update(ssm_states, x, dt, A, B, C, D, slots, slots),
        2 * bytes_of(ssm_states[: shape.requests]) + 2 * bytes_of(x),
    )
    x2, dt2, B2, C2, conv_x2 = inputs(shape.tokens)
    spans = tuple((0, shape.tokens // 4) for _ in range(4))
    some = slots[:4]
    yield KernelCase(
        f"causal_conv_prefill · {shape.tokens} tokens",
        lambda: causal_conv_prefill(conv_x2, conv_states, conv_weight, conv_bias, spans, some),
        2 * bytes_of(conv_x2),
    )
    yield KernelCase(
        f"chunk_scan · {shape.tokens} tokens, blocks of 64",
        lambda: chunk_scan(x2, dt2, A, B2, C2, D, ssm_states, spans, some, (), 64),
        2 * bytes_of(x2) + bytes_of(B2, C2, dt2),
    )


def delta_cases(shape: KernelShape) -> Iterator[KernelCase]:
    """Qwen3-Next's gated delta rule: 32 heads of 128 × 128, which read 16 key heads."""
    requests, tokens = shape.requests, shape.tokens // 4
    states = torch.randn(requests, 32, 128, 128)

    def inputs(tokens: int) -> tuple[Tensor, ...]:
        q, k = F.normalize(torch.randn(2, tokens, 16, 128), dim=-1)
        rates = -torch.rand(tokens, 32), torch.rand(tokens, 32)
        return q, k, torch.randn(tokens, 32, 128).to(DTYPE), *rates

    q, k, v, g, beta = inputs(requests)
    slots = torch.randperm(requests)
    yield KernelCase(
        f"delta_decode · {requests} requests",
        lambda: delta_decode(states, q, k, v, g, beta, slots, slots),
        2 * bytes_of(states) + 2 * bytes_of(v),
    )
    q2, k2, v2, g2, beta2 = inputs(tokens)
    spans = tuple((0, tokens // 4) for _ in range(4))
    some = slots[:4]
    yield KernelCase(
        f"delta_chunk_scan · {tokens} tokens, blocks of 64",
        lambda: delta_chunk_scan(q2, k2, v2, g2, beta2, states, spans, some, (), 64),
        2 * bytes_of(v2) + bytes_of(q2, k2, g2, beta2),
    )


def attention_cases(shape: KernelShape) -> Iterator[KernelCase]:
    per_request = shape.context // shape.page_size
    num_pages = shape.requests * per_request
    page = (shape.kv_heads, shape.page_size, shape.head_dim)
    keys = torch.randn(num_pages, *page).to(DTYPE)
    values = torch.randn(num_pages, *page).to(DTYPE)
    table = torch.randperm(num_pages).view(shape.requests, per_request)
    q = torch.randn(shape.requests, shape.q_heads, shape.head_dim).to(DTYPE)
    last = torch.full((shape.requests,), shape.context - 1)
    yield KernelCase(
        f"paged_attention_decode · {shape.requests} × {shape.context} keys",
        lambda: paged_attention_decode(q, keys, values, table, last, 0.1),
        bytes_of(keys, values),
    )
    k, v = torch.randn(2, shape.tokens, shape.kv_heads, shape.head_dim).to(DTYPE)
    rows = torch.arange(shape.tokens) // shape.context
    positions = torch.arange(shape.tokens) % shape.context
    yield KernelCase(
        f"write_kv · {shape.tokens} tokens",
        lambda: write_kv(keys, values, k, v, table, rows, positions),
        2 * bytes_of(k, v),
    )
    prompts = max(1, shape.tokens // shape.context)
    spans = tuple((0, shape.context) for _ in range(prompts))
    chunk = torch.randn(prompts * shape.context, shape.q_heads, shape.head_dim).to(DTYPE)
    yield KernelCase(
        f"paged_attention_prefill · {prompts} × {shape.context} tokens",
        lambda: paged_attention_prefill(chunk, keys, values, table[:prompts], spans, 0.1),
        2 * bytes_of(chunk) + bytes_of(k, v),
    )


def latent_cases(shape: KernelShape) -> Iterator[KernelCase]:
    """DeepSeek-V3.2's sparse attention: an index of 64 heads chooses half of the context."""
    requests, chosen = shape.requests // 4, shape.context // 2
    per_request = shape.context // shape.page_size
    num_pages = requests * per_request
    pages, index_pages = (
        torch.randn(num_pages, shape.page_size, dim).to(DTYPE) for dim in (576, 128)
    )
    table = torch.randperm(num_pages).view(requests, per_request)
    last, rows = torch.full((requests,), shape.context - 1), torch.arange(requests)
    q, index_q = (torch.randn(requests, *dims).to(DTYPE) for dims in ((128, 576), (64, 128)))
    weights = torch.randn(requests, 64)
    index = (index_q, weights, index_pages, table, last)
    places = choose_decode(*index, chosen)
    asked = f"{requests} × {shape.context} keys"
    yield KernelCase(
        f"choose_decode · {asked}",
        lambda: choose_decode(*index, chosen),
        bytes_of(index_pages, places),
    )
    yield KernelCase(
        f"latent_attention · {requests} × {chosen} places",
        lambda: latent_attention(q, pages, places, 512, 0.1),
        bytes_of(pages) // 2 + bytes_of(places),
    )
    row = q[:, 0].contiguous()
    yield KernelCase(
        f"write_latents · {requests} tokens",
        lambda: write_latents(pages, row, table, rows, last),
        2 * bytes_of(row),
    )


def seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        return seconds_on_card(run)
    run()
    run()
    laps: list[float] = []
    while len(laps) < 5 or (sum(laps) < 0.5 and len(laps) < 200):
        start = time.perf_counter()
        run()
        laps.append(time.perf_counter() - start)
    return median(laps)


def memcpy_rate() -> float:
    """Bytes a second, read and written, of a copy of 128 MiB on the processor."""
    big = torch.randint(0, 256, (1 << 27,), dtype=torch.uint8)
    target = torch.empty_like(big)
    return 2 * big.numel() / seconds(lambda: target.copy_(big), big.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=list(SHAPES), default=default)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    device, shape = torch.device(chosen.device), SHAPES[chosen.device]
    copy = (copy_rate() if device.type == "cuda" else memcpy_rate()) / 1e9
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{chosen.threads} threads"
    print(f"{name}; torch {torch.__version__}; a large copy: {copy:.0f} GB/s\n")
    print(f"{'kernel':58} {'µs':>10} {'GB/s':>8} {'share':>6}")
    for case in cases(shape, device):
        took = seconds(case.run, device)
        rate = case.num_bytes / took / 1e9
        print(f"{case.name:58} {took * 1e6:10.1f} {rate:8.1f} {rate / copy:6.0%}")


if __name__ == "__main__":
    main()
