"""Tiny configs of hybrids and mixtures, by llama.cpp's name of their architecture.

Sizes are as a converter wants them: keys and values of one size in a delta net, a vocabulary of
whole eights for a model without attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    FalconH1Config,
    FalconMambaConfig,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    JambaConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Mamba2Config,
    MambaConfig,
    NemotronHConfig,
    PretrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

Fields = Mapping[str, Any]

_ENDS: Fields = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
_TRUNK: Fields = {
    **_ENDS,
    "vocab_size": 136,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}
_HEADS: Fields = {**_TRUNK, "head_dim": 16, "rms_norm_eps": 1e-5}
_EXPERTS: Fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED: Fields = {**_EXPERTS, "shared_expert_intermediate_size": 48}
_GROUPED: Fields = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
_DELTA: Fields = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_QUARTER: Fields = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
    }
}
_THREE_AXES: Fields = {
    "rope_parameters": {
        **_QUARTER["rope_parameters"],
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
}
_CONVOLUTIONS: Fields = {
    **_TRUNK,
    "norm_eps": 1e-5,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "conv_bias": False,
}
_MIXERS: Fields = {
    **_ENDS,
    "vocab_size": 144,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "state_size": 16,
    "expand": 2,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
}
_NEMOTRON: Fields = {
    **{name: value for name, value in _TRUNK.items() if name != "num_hidden_layers"},
    "head_dim": 16,
    "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "chunk_size": 16,
}
_LATENT: Fields = {
    **_TRUNK,
    **_GROUPED,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}

_WINDOWS: Fields = {
    **_HEADS,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 32,
    "vocab_size_per_layer_input": 136,
    "final_logit_softcapping": 30.0,
}
_GEMMA4: Fields = {
    **_WINDOWS,
    "global_head_dim": 32,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1_000_000.0,
            "partial_rotary_factor": 0.25,
        },
    },
}

HYBRIDS: Mapping[str, tuple[str, PretrainedConfig]] = {
    "qwen3next": (
        "qwen3next",
        Qwen3NextConfig(**_HEADS, **_SHARED, **_DELTA, **_QUARTER, norm_topk_prob=True),
    ),
    "qwen35": ("qwen35", Qwen3_5TextConfig(**_HEADS, **_DELTA, **_THREE_AXES)),
    "qwen35moe": (
        "qwen35moe",
        Qwen3_5MoeTextConfig(
            **{name: value for name, value in _HEADS.items() if name != "intermediate_size"},
            **_SHARED,
            **_DELTA,
            **_THREE_AXES,
        ),
    ),
    "falcon-h1": (
        "falcon-h1",
        FalconH1Config(
            **_HEADS,
            mamba_d_ssm=128,
            mamba_n_heads=8,
            mamba_d_head=16,
            mamba_n_groups=2,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_chunk_size=16,
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
            embedding_multiplier=1.5,
            lm_head_multiplier=0.375,
            key_multiplier=0.75,
            attention_in_multiplier=1.25,
            attention_out_multiplier=0.75,
            ssm_in_multiplier=1.25,
            ssm_out_multiplier=0.75,
            ssm_multipliers=[0.375, 0.75, 1.25, 1.5, 0.75],
            mlp_multipliers=[0.75, 1.25],
        ),
    ),
    "nemotron_h": (
        "nemotron_h",
        NemotronHConfig(
            **_NEMOTRON, layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"]
        ),
    ),
    "nemotron_h_moe": (
        "nemotron_h_moe",
        NemotronHConfig(
            **_NEMOTRON,
            **{name: value for name, value in _GROUPED.items() if not name.startswith("first")},
            layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
            moe_shared_expert_intermediate_size=40,
        ),
    ),
    "mamba": ("mamba", MambaConfig(**_MIXERS, time_step_rank=4)),
    "falcon mamba": ("mamba", FalconMambaConfig(**_MIXERS, time_step_rank=4)),
    "mamba2": (
        "mamba2",
        Mamba2Config(**_MIXERS, num_heads=8, head_dim=16, n_groups=2, chunk_size=16),
    ),
    "jamba": (
        "jamba",
        JambaConfig(
            **_TRUNK,
            rms_norm_eps=1e-5,
            num_experts=4,
            num_experts_per_tok=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_dt_rank=4,
        ),
    ),
    "lfm2": ("lfm2", Lfm2Config(**_CONVOLUTIONS, block_multiple_of=16)),
    "lfm2moe": (
        "lfm2moe",
        Lfm2MoeConfig(
            **_CONVOLUTIONS,
            **_EXPERTS,
            num_dense_layers=1,
            use_expert_bias=True,
            norm_topk_prob=True,
            routed_scaling_factor=1.0,
        ),
    ),
    "gpt-oss": (
        "gpt-oss",
        GptOssConfig(**_HEADS, num_local_experts=4, num_experts_per_tok=2, sliding_window=32),
    ),
    "deepseek 2": (
        "deepseek2",
        DeepseekV2Config(**{**_LATENT, "norm_topk_prob": False, "topk_method": "greedy"}),
    ),
    "deepseek 3": ("deepseek2", DeepseekV3Config(**_LATENT)),
    "glm4moe": (
        "glm4moe",
        Glm4MoeConfig(**_HEADS, **_GROUPED, **_QUARTER, use_qk_norm=True, attention_bias=True),
    ),
    "dots1": ("dots1", Dots1Config(**{**_HEADS, "num_key_value_heads": 4}, **_GROUPED)),
    "gemma3n": (
        "gemma3n",
        Gemma3nTextConfig(
            **_WINDOWS,
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=32,
            altup_num_inputs=4,
            laurel_rank=32,
            activation_sparsity_pattern=[0.95, 0.95, 0.0, 0.0],
        ),
    ),
    "gemma4 small": (
        "gemma4",
        Gemma4TextConfig(
            **_GEMMA4,
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=32,
            use_double_wide_mlp=True,
        ),
    ),
    "gemma4 experts": (
        "gemma4",
        Gemma4TextConfig(
            **_GEMMA4,
            hidden_size_per_layer_input=0,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=32,
        ),
    ),
}
"""The architecture and the config of each model."""
