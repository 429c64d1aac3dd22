"""More tiny variants, by llama.cpp's name of each: latent attention, one norm for a layer, and
windows that turn otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import CohereConfig, PretrainedConfig

Fields = Mapping[str, Any]

_ENDS: Fields = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
_PLAIN: Fields = {
    **_ENDS,
    "vocab_size": 136,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
}
_COHERE: Fields = {**_PLAIN, "layer_norm_eps": 1e-5, "logit_scale": 0.25}

FURTHER: Mapping[str, tuple[str, PretrainedConfig]] = {
    "command-r": ("command-r", CohereConfig(**_COHERE)),
    "command-r with norms of heads": (
        "command-r",
        CohereConfig(**_COHERE, use_qk_norm=True, attention_bias=True),
    ),
}
