"""The tensors of a model folder, each to be taken once: a converter may leave none behind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from tools.bench.gguf.container import GgufTensor, Setting
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.model.shapes.attention_shapes import AttentionShape, NoPositions, RotaryPositions
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.shapes.rotary import NoScaling
from ferryman.model.weights.checkpoint import open_checkpoint

Names = Mapping[str, str]
"""Names in a layer, from a checkpoint's to llama.cpp's."""


class TensorSource:
    """The tensors of the folder, as views of its files."""

    def __init__(self, folder: Path) -> None:
        self._checkpoint = open_checkpoint(folder)
        self._left = dict(self._checkpoint.tensors)

    def has(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str) -> Tensor:
        """The tensor, which nobody took before. Raises ConfigError if it is missing."""
        if name not in self._left:
            raise ConfigError(f"{self._checkpoint.folder}: no tensor {name!r} is left to convert")
        return self._checkpoint.view(self._left.pop(name))

    def take_named(self, here: str, there: str, names: Names) -> list[GgufTensor]:
        """Those of `names` that exist, unchanged. A weight of two axes is a matrix."""
        return [
            GgufTensor(there + new, values := self.take(here + old), values.dim() > 1)
            for old, new in names.items()
            if self.has(here + old)
        ]

    def check_empty(self) -> None:
        """Raises ConfigError if a tensor was not converted: the two models would differ."""
        if self._left:
            raise ConfigError(
                f"{self._checkpoint.folder}: the conversion to GGUF knows no tensors "
                f"{', '.join(sorted(self._left)[:4])}"
            )


def end_tensors(source: TensorSource, norm: str) -> list[GgufTensor]:
    """The embedding, the last norm, and the head if it is not the embedding."""
    return source.take_named(
        "",
        "",
        {
            "model.embed_tokens.weight": "token_embd.weight",
            norm: "output_norm.weight",
            "lm_head.weight": "output.weight",
        },
    )


def trunk_settings(trunk: TrunkShape) -> dict[str, Setting]:
    return {
        "vocab_size": trunk.vocab_size,
        "embedding_length": trunk.hidden_dim,
        "block_count": trunk.num_layers,
        "context_length": trunk.max_positions,
        "attention.layer_norm_rms_epsilon": trunk.norm_eps,
    }


def attention_settings(shape: AttentionShape) -> dict[str, Setting]:
    """Raises ConfigError for positions that are scaled: a family that has them writes them."""
    found: dict[str, Setting] = {
        "attention.head_count": shape.q_heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
    }
    positions = shape.positions
    if isinstance(positions, NoPositions):
        return found
    return found | rotary_settings(positions)


def rotary_settings(positions: RotaryPositions) -> dict[str, Setting]:
    if not isinstance(positions.scaling, NoScaling) or positions.is_interleaved:
        raise ConfigError("the conversion to GGUF knows plain rotary positions only")
    return {"rope.dimension_count": positions.rotary_dim, "rope.freq_base": positions.theta}


def in_pairs(weight: Tensor, num_heads: int, positions: RotaryPositions | NoPositions) -> Tensor:
    """Rows of q or k [heads · head_dim, columns] in the order that ggml's plain rope rotates.

    It rotates neighbouring channels, the checkpoint's model channels half of `rotary_dim` apart.
    """
    if isinstance(positions, NoPositions):
        return weight
    head_dim, rotary_dim = len(weight) // num_heads, positions.rotary_dim
    rotated = torch.arange(rotary_dim).view(2, -1).T.flatten()
    rows = torch.cat([rotated, torch.arange(rotary_dim, head_dim)])
    return weight[(torch.arange(num_heads)[:, None] * head_dim + rows).flatten()]
