"""Compiles every Triton kernel for a Hopper GPU, on a machine that need not have one.

    python tools/compile_kernels.py                     some shapes in bfloat16 and float32
    python tools/compile_kernels.py bfloat16 published  every published shape too (minutes)

Each launcher runs on CPU tensors of real sizes. Its kernels are not launched but compiled for
sm_90, as on such a GPU, and assembled. The table shows their resources and whether registers spill.
It fails on more shared memory than a block of Hopper has, and on more spilled bytes than 256.
(The interpreter accepts kernels that the compiler refuses, so the tests run this too.)
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from ferryman_kernels import (
    _grouped_product_triton,
    _latent_attention_triton,
    _paged_attention_triton,
    _sparse_index_triton,
    _ssd_chunk_scan_triton,
)
from ferryman_kernels._delta_chunk_scan_triton import delta_chunk_scan_triton
from ferryman_kernels._grouped_product_triton import (
    FP4,
    grouped_codes_triton,
    grouped_floats_triton,
)
from ferryman_kernels._latent_attention_triton import latent_attention_triton
from ferryman_kernels._paged_attention_triton import (
    paged_attention_decode_triton,
    paged_attention_prefill_triton,
)
from ferryman_kernels._sparse_index_triton import index_scores_triton
from ferryman_kernels._ssd_chunk_scan_triton import chunk_scan_triton
from ferryman_kernels._triton import Kernel
from ferryman_kernels.causal_conv import causal_conv_decode_triton, causal_conv_prefill_triton
from ferryman_kernels.channel_delta_scan import channel_delta_runs_triton
from ferryman_kernels.delta_decode import delta_decode_triton
from ferryman_kernels.latent_pages import write_latents_triton
from ferryman_kernels.pages import write_kv_triton
from ferryman_kernels.rms_norm import gated_rms_norm_triton, rms_norm_triton
from ferryman_kernels.rotary import apply_rotary_triton
from ferryman_kernels.selective_scan import selective_runs_triton
from ferryman_kernels.slots import clear_slots_triton, copy_slots_triton
from ferryman_kernels.ssd_decode import selective_state_update_triton

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
ALIGNED = [["tt.divisibility", 16]]
MAX_SHARED_BYTES = 227 * 1024
MAX_SPILLED_BYTES = 256

_built: set[str] = set()
_refused: list[str] = []


def compile_kernel(kernel: Kernel, *args: Any, **constants: Any) -> None:
    """Compiles a kernel as a launch with these arguments would, and prints a line."""
    options = {"ptx_version": 88}  # the version that Triton's own assembler for Hopper reads
    for name in {"num_warps", "num_stages"} & constants.keys():
        options[name] = constants.pop(name)
    function = JITFunction(kernel.function)
    given = dict(zip(function.arg_names, args, strict=False)) | constants
    signature, attributes, fixed = {}, {}, dict[str, Any]()
    for index, parameter in enumerate(function.params):
        value = given[parameter.name]
        signature[parameter.name] = _type_of(value, parameter.is_constexpr)
        if signature[parameter.name] == "constexpr":
            fixed[parameter.name] = value
        elif isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[index,] = ALIGNED
    source = ASTSource(function, signature, fixed, attributes)
    key = repr((kernel.function.__name__, signature, attributes, fixed, options))
    if key in _built:
        return
    _built.add(key)
    built = triton.compile(source, target=HOPPER, options=options)
    registers, spilled = _assemble(built.asm["ptx"])
    shared = built.metadata.shared
    line = f"{kernel.function.__name__:32} {registers:3} registers, {spilled:4} bytes spilled"
    print(f"{line}, {shared} bytes shared, {built.metadata.num_warps} warps", flush=True)
    if shared > MAX_SHARED_BYTES or spilled > MAX_SPILLED_BYTES:
        _refused.append(f"{line}, {shared} bytes shared: {fixed}")


def _type_of(value: Any, is_constexpr: bool) -> str:
    if is_constexpr or (isinstance(value, int) and value == 1):
        return "constexpr"
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _assemble(ptx: str) -> tuple[int, int]:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(PTXAS), "-v", "-arch=sm_90a", str(source), "-o", "/dev/null"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.findall(r"Used (\d+) registers|(\d+) bytes spill stores", log)
    registers = max(int(used) for used, _ in found if used)
    spilled = sum(int(spill) for _, spill in found if spill)
    return registers, spilled


@contextmanager
def compiling_for_a_gpu() -> Iterator[None]:
    """Inside the block a launch only compiles, and products keep the dtype they have on a GPU."""

    def dot_type(operand: Tensor) -> Any:
        return tl.bfloat16 if operand.dtype == torch.bfloat16 else tl.float32

    def launch(kernel: Kernel, _: tuple[int, ...]) -> Any:
        return lambda *args, **constants: compile_kernel(kernel, *args, **constants)

    with (
        patch.object(Kernel, "__getitem__", launch),
        patch.object(_ssd_chunk_scan_triton, "dot_type", dot_type),
        patch.object(_paged_attention_triton, "dot_type", dot_type),
        patch.object(_latent_attention_triton, "dot_type", dot_type),
        patch.object(_sparse_index_triton, "dot_type", dot_type),
        patch.object(_grouped_product_triton, "dot_type", dot_type),
    ):
        yield


def launch_latents(dtype: torch.dtype) -> None:
    """Launches the kernels of latent attention, in the shapes of a DeepSeek-V3.2 layer."""
    index, table = torch.zeros(8, dtype=torch.int64), torch.zeros(8, 32, dtype=torch.int64)
    pages = torch.zeros(4, 64, 576, dtype=dtype)
    write_latents_triton(pages, pages[0, :8], table, index, index)
    q = torch.zeros(8, 64, 128, dtype=dtype)
    index_scores_triton(q, q[:, :, 0], pages[:, :, :128].contiguous(), table, index, index)
    places = torch.zeros(8, 2048, dtype=torch.int64)
    latent_attention_triton(torch.zeros(8, 128, 576, dtype=dtype), pages, places, 512, 0.1)


def launch_delta_rule(dtype: torch.dtype) -> None:
    """Launches the kernels of a gated delta net, in the shapes of a Qwen3-Next layer."""
    q, v = torch.zeros(8, 16, 128, dtype=dtype), torch.zeros(8, 32, 128, dtype=dtype)
    states, rates = torch.zeros(2, 32, 128, 128), torch.zeros(8, 32)
    index = torch.zeros(8, dtype=torch.int64)
    delta_decode_triton(states, q, q, v, rates, rates, index, index)
    q, v, rates = (rows.repeat(16, *(1,) * (rows.ndim - 1)) for rows in (q, v, rates))
    delta_chunk_scan_triton(
        q.float(), q.float(), v, rates, rates, states, ((0, 128),), index[:1], (), 64
    )


def launch_mamba1(dtype: torch.dtype) -> None:
    """The scan of a FalconMamba layer: 8192 channels of 16 states."""
    x, B = torch.zeros(128, 8192, dtype=dtype), torch.zeros(128, 16, dtype=dtype)
    dt, A, D = torch.zeros(128, 8192), torch.zeros(8192, 16), torch.zeros(8192)
    runs = torch.zeros(2, 5, dtype=torch.int64)
    y = torch.zeros(128, 8192)
    selective_runs_triton((x, dt, A, B, B, D), torch.zeros(2, 8192, 16), runs, y)


def launch_kimi_delta(dtype: torch.dtype) -> None:
    """The scan of a Kimi Linear layer: 32 heads of 128 × 128."""
    keys, v = torch.zeros(64, 32, 128), torch.zeros(64, 32, 128, dtype=dtype)
    given = keys, keys, v, keys, torch.zeros(64, 32)
    runs = torch.zeros(2, 5, dtype=torch.int64)
    channel_delta_runs_triton(given, torch.zeros(2, 32, 128, 128), runs, torch.zeros(64, 32, 128))


def launch_experts(dtype: torch.dtype) -> None:
    """Few and many tokens of a gpt-oss layer's experts, in floats and in MXFP4."""
    for pairs in (8, 4096):
        order = torch.zeros(pairs, dtype=torch.int64)
        routed = order, torch.zeros(33, dtype=torch.int64)
        x, bias = torch.zeros(pairs // 4, 2880, dtype=dtype), torch.zeros(32, 5760, dtype=dtype)
        weight = torch.empty(32, 5760, 2880, dtype=dtype)
        grouped_floats_triton(x, weight, bias, *routed)
        codes = torch.empty(32, 5760, 1440, dtype=torch.uint8), FP4
        scales = torch.empty(32, 5760, 90, dtype=torch.uint8)
        groups = torch.empty(32, 2880, dtype=torch.int32)
        grouped_codes_triton(x, codes, (scales, None, groups, 32), bias, *routed)


def launch_all(dtype: torch.dtype) -> None:
    """Launches everything once, in the shapes of a Granite 4 H layer and of other families."""

    def rows(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    index = torch.zeros(8, dtype=torch.int64)
    rms_norm_triton(rows(8, 2048), rows(2048), 1e-5)
    gated_rms_norm_triton(rows(8, 4096), rows(8, 4096), rows(4096), 1e-5, 1)
    apply_rotary_triton(rows(8, 32, 128), rows(8, 8, 128), index, torch.zeros(64))
    slab = torch.zeros(2, 1 << 16, dtype=torch.uint8)
    copy_slots_triton(slab, index, index)
    clear_slots_triton(slab, index)
    pages, table = rows(4, 8, 64, 128), torch.zeros(8, 32, dtype=torch.int64)
    write_kv_triton(pages, pages, rows(8, 8, 128), rows(8, 8, 128), table, index, index)
    conv = (rows(9, 4352, 3), rows(4352, 4), rows(4352))
    causal_conv_prefill_triton(rows(128, 4352), *conv, ((0, 128),), index[:1], ())
    causal_conv_decode_triton(rows(8, 4352), *conv, index, index)
    states, A = torch.zeros(2, 64, 64, 128), torch.zeros(64)
    x, dt, B = rows(128, 64, 64), torch.zeros(128, 64), rows(128, 1, 128)
    selective_state_update_triton(states, x[:8], dt[:8], A, B[:8], B[:8], A, index, index)
    chunk_scan_triton(x, dt, A, B, B, A, states, ((0, 128),), index[:1], (), 64)
    launch_mamba1(dtype)
    for sinks in (None, torch.zeros(32)):
        attended = (rows(8, 32, 128), pages, pages)
        paged_attention_decode_triton(*attended, table, index, 0.1, 0, sinks)
        paged_attention_prefill_triton(*attended, table[:1], ((0, 8),), 0.1, 0, sinks)
    paged_attention_decode_triton(*attended, table, index, 0.1, 0, None, 50.0)
    paged_attention_prefill_triton(*attended, table[:1], ((0, 8),), 0.1, 0, None, 50.0)
    launch_delta_rule(dtype)
    launch_latents(dtype)
    launch_experts(dtype)
    launch_kimi_delta(dtype)


def launch_attention(
    dtype: torch.dtype, heads: tuple[int, int], head_dim: int, has_sinks: bool, cap: float
) -> None:
    """Decode and prefill; `heads` are those of queries and of keys."""
    index, table = torch.zeros(8, dtype=torch.int64), torch.zeros(8, 32, dtype=torch.int64)
    q = torch.zeros(8, heads[0], head_dim, dtype=dtype)
    pages = torch.zeros(4, heads[1], 64, head_dim, dtype=dtype)
    seen = (0.1, 0, torch.zeros(heads[0]) if has_sinks else None, cap)
    paged_attention_decode_triton(q, pages, pages, table, index, *seen)
    paged_attention_prefill_triton(q, pages, pages, table[:1], ((0, 8),), *seen)


def launch_mamba(dtype: torch.dtype, heads: int, head_dim: int, groups: int, state: int) -> None:
    """The scan and the step of a Mamba-2 layer."""
    states, A = torch.zeros(2, heads, head_dim, state), torch.zeros(heads)
    x, dt = torch.zeros(128, heads, head_dim, dtype=dtype), torch.zeros(128, heads)
    B, index = torch.zeros(128, groups, state, dtype=dtype), torch.zeros(8, dtype=torch.int64)
    selective_state_update_triton(states, x[:8], dt[:8], A, B[:8], B[:8], A, index, index)
    chunk_scan_triton(x, dt, A, B, B, A, states, ((0, 128),), index[:1], (), 64)


def launch_wide(dtype: torch.dtype) -> None:
    """The largest tiles: states of 128 × 256 (Falcon-H1), heads of 256 and 512 (Gemma, Gemma 4)."""
    launch_mamba(dtype, 24, 128, 1, 256)
    launch_attention(dtype, (8, 4), 256, has_sinks=False, cap=0.0)
    launch_attention(dtype, (16, 2), 512, has_sinks=False, cap=0.0)


def launch_published(dtype: torch.dtype) -> None:
    """Attention and Mamba-2 of every config in tests/model/published, each shape once."""
    from tools.model_tables import published_configs

    from ferryman.model.config import load_config

    for published in published_configs():
        with tempfile.TemporaryDirectory() as folder:
            config = load_config(published.write(Path(folder)))
        print(f"\n{published.model}", flush=True)
        for shape in set(map(_launch_of, _values(config))) - {None}:
            assert shape is not None
            launch, *sizes = shape
            launch(dtype, *sizes)


def _values(value: Any) -> Iterator[Any]:
    """A config's shapes, wherever they lie in it."""
    yield value
    if is_dataclass(value):
        for field in fields(value):
            yield from _values(getattr(value, field.name))
    elif isinstance(value, tuple):
        for part in value:
            yield from _values(part)


def _launch_of(shape: Any) -> tuple[Any, ...] | None:
    match type(shape).__name__:
        case "AttentionShape":
            heads = shape.q_heads, shape.kv_heads
            return launch_attention, heads, shape.head_dim, shape.has_sinks, shape.score_cap
        case "MambaShape":
            sizes = shape.ssm_heads, shape.ssm_head_dim, shape.ssm_groups, shape.ssm_state
            return launch_mamba, *sizes
    return None


def main(words: list[str]) -> None:
    dtypes = [word for word in words if word != "published"] or ["bfloat16", "float32"]
    for name in dtypes:
        print(f"\n{name}")
        with compiling_for_a_gpu():
            launch_all(getattr(torch, name))
            launch_wide(getattr(torch, name))
            if "published" in words:
                launch_published(getattr(torch, name))
    if _refused:
        sys.exit("\n".join(["\nthese do not fit a Hopper GPU:", *_refused]))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main(sys.argv[1:])
