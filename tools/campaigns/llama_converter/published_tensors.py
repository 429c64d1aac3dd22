"""Tensors of folders as they were published, for the converter alone: transformers 5.23 saves them
under other names, and reads both. Rotating channels of HY V4 are neighbours there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tests.model.neighbouring_channels import with_neighbours
from tests.model.test_deepseek_v4 import PACKED, in_fp4, published_name
from tests.model.test_hy_v4 import published as hy_v4_name
from tests.model.test_step3p7 import published_tensors as step_tensors
from torch import Tensor

Tensors = Mapping[str, Tensor]
Config = Mapping[str, Any]


def _hy_v4_tensors(saved: Tensors, config: Config) -> Tensors:
    paired = with_neighbours(saved, config)
    return {hy_v4_name(name): tensor for name, tensor in paired.items()}


def _step_tensors(saved: Tensors, config: Config) -> Tensors:
    return dict(step_tensors(saved))


def _deepseek_v4_tensors(saved: Tensors, config: Config) -> Tensors:
    """Experts in MXFP4: two codes a byte, and a power of two for 32 of them."""
    published = dict[str, Tensor]()
    for name, tensor in saved.items():
        there = published_name(name)
        if PACKED.search(name):
            published[there], published[there.replace(".weight", ".scale")], _ = in_fp4(tensor)
        else:
            published[there] = tensor
    return published


def _minimax_m3_tensors(saved: Tensors, config: Config) -> Tensors:
    """Matrices apart that transformers has joined."""
    published = dict[str, Tensor]()
    for joined, tensor in saved.items():
        name = joined.replace("self_attn.indexer.", "self_attn.index_")
        name = name.replace("mlp.gate.e_score", "mlp.e_score")
        under, _, part = name.rpartition("mlp.")
        if part.startswith(("gate.", "e_score", "experts", "shared")):
            name = f"{under}block_sparse_moe.{part}"
        for apart, matrix in _apart(name, tensor):
            published[apart] = matrix.contiguous()
    return published


def _apart(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if name.endswith("gate_up_proj.weight"):
        for part, matrix in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield name.replace("gate_up", part), matrix
    elif name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        words, under = ("w1", "w3"), name.rpartition(".")[0]
        names = words if "gate_up" in name else ("w2",)
        for expert, rows in enumerate(tensor):
            for word, matrix in zip(names, rows.chunk(len(names)), strict=True):
                yield f"{under}.{expert}.{word}.weight", matrix
    else:
        yield name, tensor


def round_experts(architecture: str, folder: Path) -> None:
    """Gives experts the nearest numbers that the converter takes them in."""
    if architecture == "deepseek4":
        file = folder / "model.safetensors"
        rounded = {
            name: in_fp4(tensor)[2].float() if PACKED.search(name) else tensor
            for name, tensor in load_file(file).items()
        }
        save_file(rounded, file, metadata={"format": "pt"})


_PUBLISHED: Mapping[str, Callable[[Tensors, Config], Tensors]] = {
    "hy_v4": _hy_v4_tensors,
    "step35": _step_tensors,
    "deepseek4": _deepseek_v4_tensors,
    "minimax-m3": _minimax_m3_tensors,
}


@contextmanager
def published_tensors(architecture: str, folder: Path) -> Iterator[None]:
    """The folder with its tensors as they were published."""
    file = folder / "model.safetensors"
    saved = file.read_bytes()
    if architecture in _PUBLISHED:
        config = json.loads((folder / "config.json").read_text())
        published = _PUBLISHED[architecture](load_file(file), config)
        save_file(dict(published), file, metadata={"format": "pt"})
    try:
        yield
    finally:
        file.write_bytes(saved)
