"""Tiny models whose attention is at places that an index chooses: llama.cpp's name of each, and a
config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.gguf_models.hybrid_models import _LATENT
from transformers import HYV4Config, PretrainedConfig

Fields = Mapping[str, Any]

_INDEX: Fields = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8}
_TURNING: Fields = {"rope_type": "default", "rope_theta": 10_000.0}

SPARSE: Mapping[str, tuple[str, PretrainedConfig]] = {
    "hy_v4": (
        "hy_v4",
        HYV4Config(
            **_LATENT,
            **_INDEX,
            rope_parameters=_TURNING,
            indexer_types=["full", "full", "shared", "full"],
            hc_mult=3,
            hc_magnitude=0.5,
            hc_eps=1e-4,
            swiglu_limit=0.5,
        ),
    ),
}
