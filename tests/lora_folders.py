"""LoRA adapters in PEFT's format with random numbers, and the models with them merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LAYERS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "in_proj",
    "out_proj",
    "input_linear",
    "output_linear",
)
"""The last words of linear layers that adapters are trained for."""


@dataclass(frozen=True)
class RandomAdapter:
    """An adapter of the model in `base`, written to `folder`; `parts` are its (A, B) by layer."""

    base: Path
    folder: Path
    scale: float
    parts: dict[str, tuple[Tensor, Tensor]]

    def merged(self, folder: Path) -> Path:
        """Writes the model with W + scale · B·A in place of each W, in float64."""
        shutil.copytree(self.base, folder)
        weights = weights_of(self.base)
        for layer, (down, up) in self.parts.items():
            name = f"{layer}.weight"
            weights[name] = weights[name].double() + self.scale * (up.double() @ down.double())
        save_file(weights, folder / "model.safetensors")
        return folder


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def save_adapter(
    base: Path,
    folder: Path,
    *,
    seed: int,
    rank: int = 4,
    words: Iterable[str] = LAYERS,
    **config: Any,
) -> RandomAdapter:
    """Writes an adapter for the layers of `base` whose names end with one of `words`."""
    draw = torch.Generator().manual_seed(seed)
    ends = tuple(f".{word}.weight" for word in words)
    parts, tensors = {}, {}
    for name, weight in sorted(weights_of(base).items()):
        if name.endswith(ends) and weight.ndim == 2 and "experts" not in name:
            layer = name.removesuffix(".weight")
            down = torch.randn(rank, weight.shape[1], generator=draw) / sqrt(weight.shape[1])
            up = torch.randn(weight.shape[0], rank, generator=draw) / 4
            parts[layer] = down, up
            tensors[f"base_model.model.{layer}.lora_A.weight"] = down
            tensors[f"base_model.model.{layer}.lora_B.weight"] = up
    given = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", **config}
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(given))
    save_file(tensors, folder / "adapter_model.safetensors")
    root = sqrt(rank) if given.get("use_rslora") else rank
    return RandomAdapter(base, folder, float(given["lora_alpha"]) / root, parts)
