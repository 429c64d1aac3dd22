"""Tiny configs of transformers with norms around the mean or with experts, by llama.cpp's name of
their architecture, which some words may follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import (
    Cohere2Config,
    Ernie4_5_MoeConfig,
    GPTNeoXConfig,
    HunYuanMoEV1Config,
    MiniMaxM2Config,
    OlmoConfig,
    OlmoeConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
    Starcoder2Config,
)

Fields = Mapping[str, Any]

_SIZES: Fields = {
    "vocab_size": 131,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_HEADS: Fields = {**_SIZES, "num_key_value_heads": 2}
_CENTRED: Fields = {**_HEADS, "layer_norm_eps": 1e-5}
_RMS: Fields = {**_HEADS, "rms_norm_eps": 1e-5}
_CHOICE: Fields = {"num_experts": 4, "num_experts_per_tok": 2}
_PLAIN: Fields = {"rope_type": "default", "rope_theta": 10_000.0}
_LONG: Fields = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 256,
    # Numbers that float32 has, as published factors are.
    "long_factor": [1.0, 1.25, 1.5, 2.0, 4.0, 8.0],
    "short_factor": [1.0, 1.0, 1.125, 1.25, 1.5, 2.0],
}

TRANSFORMERS: Mapping[str, PretrainedConfig] = {
    "olmo": OlmoConfig(**_HEADS, clip_qkv=8.0),
    "stablelm": StableLmConfig(**_CENTRED, use_qkv_bias=True),
    "stablelm side by side": StableLmConfig(
        **_CENTRED, use_parallel_residual=True, qk_layernorm=True
    ),
    "starcoder2": Starcoder2Config(**_HEADS, norm_epsilon=1e-5, sliding_window=4096),
    "gptneox": GPTNeoXConfig(**_SIZES, rotary_pct=0.25, layer_norm_eps=1e-5),
    "cohere2": Cohere2Config(**_CENTRED, head_dim=16, sliding_window=32, logit_scale=0.125),
    # The converter takes four times the hidden size, whatever the config says.
    "phi2": PhiConfig(**{**_CENTRED, "num_key_value_heads": 4, "intermediate_size": 256}),
    "phi3": Phi3Config(
        **_RMS, sliding_window=32, rope_parameters=_PLAIN, original_max_position_embeddings=1024
    ),
    "phi3 long": Phi3Config(
        **_RMS, sliding_window=None, rope_parameters=_LONG, original_max_position_embeddings=256
    ),
    "olmoe": OlmoeConfig(**{**_RMS, "num_key_value_heads": 4}, **_CHOICE, norm_topk_prob=False),
    "minimax-m2": MiniMaxM2Config(
        **_RMS,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={**_PLAIN, "partial_rotary_factor": 0.5},
    ),
    "hunyuan-moe": HunYuanMoEV1Config(**_RMS, head_dim=16, num_experts=4, moe_topk=2),
    "ernie4_5-moe": Ernie4_5_MoeConfig(
        **_RMS, moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_num_shared_experts=2
    ),
    "qwen3vl": Qwen3Config(**_RMS, head_dim=16),
    "qwen3vlmoe": Qwen3MoeConfig(
        **_RMS, **_CHOICE, head_dim=16, moe_intermediate_size=32, norm_topk_prob=True
    ),
}
