"""Tiny variants of Llama, GPT-2, and mixtures: llama.cpp's name of each, and a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.gguf_models.hybrid_models import _LATENT
from transformers import (
    AfmoeConfig,
    ArceeConfig,
    DeepseekV32Config,
    ExaoneMoeConfig,
    GlmConfig,
    GlmMoeDsaConfig,
    GPT2Config,
    GraniteMoeSWAConfig,
    GraniteSWAConfig,
    HYV3Config,
    KimiLinearConfig,
    Llama4TextConfig,
    Ministral3Config,
    PretrainedConfig,
)

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
    "rms_norm_eps": 1e-5,
}
_HEADS: Fields = {**_PLAIN, "head_dim": 16}
_TURNING: Fields = {"rope_type": "default", "rope_theta": 10_000.0}
_EXPERTS: Fields = {
    **_HEADS,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_shared_experts": 1,
    "rope_parameters": _TURNING,
}
_GRANITE: Fields = {
    **_PLAIN,
    "sliding_window": 32,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
    "logits_scaling": 8.0,
}
_INDEX: Fields = {**_LATENT, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8}
_DELTAS: Fields = {
    **{name: value for name, value in _LATENT.items() if name != "n_routed_experts"},
    "q_lora_rank": None,
    "num_local_experts": 4,
    "tie_word_embeddings": False,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_GROWING: Fields = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Positions of Ministral 3, whose queries grow from the 17th token on."""

VARIANTS: Mapping[str, tuple[str, PretrainedConfig]] = {
    "gpt2": (
        "gpt2",
        GPT2Config(**_ENDS, vocab_size=136, n_embd=64, n_layer=4, n_head=4, n_positions=1024),
    ),
    "arcee": ("arcee", ArceeConfig(**_PLAIN)),
    "mistral3": (
        "mistral3",
        Ministral3Config(**_HEADS, rope_parameters=_GROWING, sliding_window=None),
    ),
    "chatglm": (
        "chatglm",
        GlmConfig(
            **_HEADS,
            attention_bias=True,
            rope_parameters={**_TURNING, "partial_rotary_factor": 0.5},
        ),
    ),
    "llama4": (
        "llama4",
        Llama4TextConfig(
            **_HEADS,
            intermediate_size_mlp=80,
            num_local_experts=4,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
            rope_parameters=_TURNING,
        ),
    ),
    "afmoe": (
        "afmoe",
        AfmoeConfig(
            **_EXPERTS, num_dense_layers=1, route_scale=2.4, mup_enabled=True, sliding_window=32
        ),
    ),
    "hy_v3": (
        "hy_v3",
        HYV3Config(
            **_EXPERTS, router_scaling_factor=2.8, mlp_layer_types=["dense"] + ["sparse"] * 3
        ),
    ),
    "exaone-moe": (
        "exaone-moe",
        ExaoneMoeConfig(**_EXPERTS, first_k_dense_replace=1, sliding_window=32),
    ),
    "granite_swa": ("granite_swa", GraniteSWAConfig(**_GRANITE)),
    "granite_swa with experts": (
        "granite_swa",
        GraniteMoeSWAConfig(**_GRANITE, num_local_experts=4, num_experts_per_tok=2),
    ),
    "deepseek32": ("deepseek32", DeepseekV32Config(**_INDEX)),
    "glm-dsa": (
        "glm-dsa",
        GlmMoeDsaConfig(**_INDEX, indexer_types=["full", "shared", "full", "shared"]),
    ),
    "kimi-linear": ("kimi-linear", KimiLinearConfig(**_DELTAS)),
}
