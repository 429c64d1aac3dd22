"""Tiny variants of Llama, GPT-2, and mixtures: llama.cpp's name of each, and a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.gguf_models.further_variants import FURTHER, GROWING
from tests.gguf_models.hybrid_models import _LATENT
from transformers import (
    AfmoeConfig,
    ApertusConfig,
    ArceeConfig,
    BailingHybridConfig,
    Cohere2MoeConfig,
    DeepseekV32Config,
    ExaoneMoeConfig,
    GlmConfig,
    GlmMoeDsaConfig,
    GPT2Config,
    GraniteMoeSWAConfig,
    GraniteSWAConfig,
    HYV3Config,
    KimiLinearConfig,
    LagunaConfig,
    Llama4TextConfig,
    MiMoV2FlashConfig,
    MiniMaxConfig,
    Ministral3Config,
    PhimoeConfig,
    PretrainedConfig,
)
from transformers.models.minimax_m3_vl import MiniMaxM3VLTextConfig

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
_FULL, _WINDOW = "full_attention", "sliding_attention"
_LAGUNA: Fields = {
    **{name: value for name, value in _EXPERTS.items() if name != "num_shared_experts"},
    "num_hidden_layers": 5,
    "shared_expert_intermediate_size": 48,
    "moe_routed_scaling_factor": 2.5,
    "sliding_window": 32,
    "num_attention_heads_per_layer": [4, 2, 2, 2, 4],
    "layer_types": [_FULL, _WINDOW, _WINDOW, _WINDOW, _FULL],
    "rope_parameters": {
        _FULL: {
            "rope_type": "yarn",
            "rope_theta": 500_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "partial_rotary_factor": 0.5,
            "attention_factor": 1.25,
        },
        _WINDOW: {**_TURNING, "partial_rotary_factor": 1.0},
    },
}
_SHORT_WAVES: Fields = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * wave for wave in range(8)],
    "long_factor": [1.0 + 0.3 * wave for wave in range(8)],
    "short_mscale": 1.243163121016122,
    "long_mscale": 1.243163121016122,
    "original_max_position_embeddings": 64,
}
_HALF: Fields = {"rope_type": "default", "partial_rotary_factor": 0.5}

VARIANTS: Mapping[str, tuple[str, PretrainedConfig]] = {
    **FURTHER,
    "gpt2": (
        "gpt2",
        GPT2Config(**_ENDS, vocab_size=136, n_embd=64, n_layer=4, n_head=4, n_positions=1024),
    ),
    "arcee": ("arcee", ArceeConfig(**_PLAIN)),
    "mistral3": (
        "mistral3",
        Ministral3Config(**_HEADS, rope_parameters=dict(GROWING), sliding_window=None),
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
    "apertus": ("apertus", ApertusConfig(**_PLAIN, rope_parameters=_TURNING)),
    "laguna": ("laguna", LagunaConfig(**_LAGUNA, gating="per-element")),
    "laguna with gates by head": ("laguna", LagunaConfig(**_LAGUNA, gating="per-head")),
    "cohere2moe": (
        "cohere2moe",
        Cohere2MoeConfig(
            **{name: value for name, value in _HEADS.items() if name != "rms_norm_eps"},
            layer_norm_eps=1e-5,
            num_experts=4,
            num_experts_per_tok=2,
            num_shared_experts=2,
            first_k_dense_replace=1,
            prefix_dense_intermediate_size=80,
            sliding_window=32,
            expert_selection_fn="sigmoid",
            logit_scale=0.5,
            rope_parameters=_TURNING,
        ),
    ),
    "mimo2": (
        "mimo2",
        MiMoV2FlashConfig(
            **_HEADS,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            v_head_dim=8,
            sliding_window=32,
            rope_parameters={
                _FULL: {**_HALF, "rope_theta": 500_000.0},
                _WINDOW: {**_HALF, "rope_theta": 10_000.0},
            },
        ),
    ),
    "phimoe": (
        "phimoe",
        PhimoeConfig(
            **{**_PLAIN, "max_position_embeddings": 64},
            num_local_experts=4,
            num_experts_per_tok=2,
            attention_bias=True,
            lm_head_bias=True,
            sliding_window=None,
            rope_parameters=_SHORT_WAVES,
        ),
    ),
    "bailingmoe3": (
        "bailingmoe3",
        BailingHybridConfig(
            **{**_PLAIN, "num_key_value_heads": 4},
            num_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=32,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
            layer_group_size=2,
            first_k_dense_replace=1,
            linear_head_dim=16,
            linear_num_heads=4,
        ),
    ),
    "minimax-01": (
        "minimax-01",
        MiniMaxConfig(
            **{**_HEADS, "num_hidden_layers": 8},
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=["linear_attention"] * 7 + [_FULL],
            rope_parameters={**_TURNING, "partial_rotary_factor": 0.5},
            **{f"{part}_alpha_factor": 3.5 for part in ("full_attn", "linear_attn", "mlp")},
        ),
    ),
    "minimax-m3": (
        "minimax-m3",
        MiniMaxM3VLTextConfig(
            **_HEADS,
            rotary_dim=8,
            dense_intermediate_size=80,
            shared_intermediate_size=96,
            num_local_experts=4,
            num_experts_per_tok=2,
            routed_scaling_factor=2.5,
            mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
            layer_types=[_FULL] + ["minimax_m3_sparse"] * 3,
            index_n_heads=2,
            index_head_dim=16,
            index_block_size=8,
            index_topk_blocks=3,
            index_local_blocks=1,
            rope_parameters={**_TURNING, "partial_rotary_factor": 0.5},
        ),
    ),
}
