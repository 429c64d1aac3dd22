"""More tiny variants, by llama.cpp's name of each: latent attention, one norm for a layer, and
windows that turn otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.model.families.step3p7 import Step3p7FlashForCausalLM
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    MellumConfig,
    MiniCPM3Config,
    Mistral4Config,
    Mistral4ForCausalLM,
    PretrainedConfig,
)
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig

# transformers lists them among models with images alone.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
AutoModelForCausalLM.register(Step3p7TextConfig, Step3p7FlashForCausalLM, exist_ok=True)

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
_LATENT: Fields = {
    **_PLAIN,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rms_norm_eps": 1e-5,
}
GROWING: Fields = {
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
"""Positions of Ministral 3 and Mistral 4, whose queries grow from the 17th token on.

A config writes into the one that it is given, so each has its own."""
_FULL, _WINDOW = "full_attention", "sliding_attention"
_MELLUM: Fields = {
    **_PLAIN,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_WAVES_OF_MELLUM: Fields = {
    _FULL: {
        "rope_type": "yarn",
        "rope_theta": 500_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
    _WINDOW: {"rope_type": "default", "rope_theta": 10_000.0},
}
_STEP: Fields = {
    **_PLAIN,
    "pad_token_id": 0,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "num_sliding_attention_heads": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "share_expert_dim": 48,
    "moe_router_scaling_factor": 3.0,
    "sliding_window": 32,
    "layer_types": [_FULL, _WINDOW, _WINDOW, _FULL],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "rope_parameters": {
        _FULL: {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 32.0,
            "original_max_position_embeddings": 256,
            "partial_rotary_factor": 0.5,
        },
        _WINDOW: {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
    },
}

FURTHER: Mapping[str, tuple[str, PretrainedConfig]] = {
    "command-r": ("command-r", CohereConfig(**_COHERE)),
    "command-r with norms of heads": (
        "command-r",
        CohereConfig(**_COHERE, use_qk_norm=True, attention_bias=True),
    ),
    "mistral4": (
        "mistral4",
        Mistral4Config(
            **_LATENT,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            n_shared_experts=2,
            first_k_dense_replace=1,
            routed_scaling_factor=1.5,
            rope_parameters=dict(GROWING),
        ),
    ),
    "mellum": (
        "mellum",
        MellumConfig(
            **_MELLUM,
            sliding_window=32,
            layer_types=[_WINDOW, _WINDOW, _WINDOW, _FULL],
            rope_parameters=_WAVES_OF_MELLUM,
        ),
    ),
    "mellum without windows": (
        "mellum",
        MellumConfig(
            **_MELLUM,
            sliding_window=None,
            rope_parameters=dict.fromkeys((_FULL, _WINDOW), _WAVES_OF_MELLUM[_WINDOW]),
        ),
    ),
    "minicpm3": ("minicpm3", MiniCPM3Config(**_LATENT)),
    "minicpm3 with factors of waves": (
        "minicpm3",
        MiniCPM3Config(
            **_LATENT,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "long_factor": [1.0, 1.25, 1.5, 2.0],
                "short_factor": [1.0, 1.125, 1.25, 1.5],
                "original_max_position_embeddings": 1024,
            },
        ),
    ),
    "step35": ("step35", Step3p7TextConfig(**_STEP)),
    "step35 with limits": (
        "step35",
        Step3p7TextConfig(
            **_STEP,
            swiglu_limits=[0.0, 0.25, 0.0, 0.5],
            swiglu_limits_shared=[0.25, 0.0, 0.0, 0.125],
        ),
    ),
}
