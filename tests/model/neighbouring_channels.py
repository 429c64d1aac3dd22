"""Weights of HY V4 whose rotating channels are neighbours, from those of transformers, whose
rotating channels are halves of a head apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_BY_HEAD = {"q_b_proj.weight": "num_attention_heads", "indexer.wq_b.weight": "index_n_heads"}
_OF_ONE = ("kv_a_proj_with_mqa.weight", "indexer.wk.weight", "k_norm.weight", "k_norm.bias")


def with_neighbours(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The same model, whose pairs of channels lie side by side at the end of each head."""
    return {name: _paired(name, tensor, config) for name, tensor in tensors.items()}


def _paired(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    counts = [config[field] for ending, field in _BY_HEAD.items() if name.endswith(ending)]
    if name.endswith(_OF_ONE):
        counts = [1]
    if not counts:
        return tensor
    rope_dim = config["qk_rope_head_dim"]
    heads = tensor.view(counts[0], -1, *tensor.shape[1:])
    plain, turning = heads[:, :-rope_dim], heads[:, -rope_dim:]
    halves = turning.reshape(counts[0], 2, rope_dim // 2, *tensor.shape[1:])
    pairs = halves.transpose(1, 2).flatten(1, 2)
    return torch.cat((plain, pairs), dim=1).flatten(0, 1)
