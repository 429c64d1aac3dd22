"""Configs of random models with layers as wide as published ones: two layers, a small vocabulary.

Tiny layers hide what caches, blocks of products and the number of experts do to the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import (
    DeepseekV3Config,
    FalconH1Config,
    GptOssConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3NextConfig,
)

_TRUNK: Mapping[str, Any] = {
    "vocab_size": 2_048,
    "hidden_size": 1_024,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4_096,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: Mapping[str, Any] = {"num_experts_per_tok": 4, "moe_intermediate_size": 256}
_RECURRENT_FIRST = ["linear_attention", "full_attention"]


def wide_llama() -> PretrainedConfig:
    return LlamaConfig(
        **_TRUNK,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=2_816,
    )


def wide_granite() -> PretrainedConfig:
    """Mamba-2 and experts."""
    return GraniteMoeHybridConfig(
        **_TRUNK,
        layer_types=_RECURRENT_FIRST,
        num_attention_heads=8,
        num_key_value_heads=2,
        position_embedding_type="nope",
        mamba_n_heads=32,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_d_conv=4,
        mamba_expand=2,
        num_local_experts=32,
        num_experts_per_tok=4,
        intermediate_size=256,
        shared_intermediate_size=512,
        embedding_multiplier=3.0,
        attention_multiplier=0.09,
        residual_multiplier=0.7,
        logits_scaling=1.7,
    )


def wide_falcon_h1() -> PretrainedConfig:
    """Attention and Mamba-2 side by side."""
    return FalconH1Config(
        **_TRUNK,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        intermediate_size=2_048,
        mamba_d_ssm=2_048,
        mamba_n_heads=32,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
    )


def wide_qwen3_next() -> PretrainedConfig:
    """A gated delta net and experts."""
    return Qwen3NextConfig(
        **_TRUNK,
        **_EXPERTS,
        layer_types=_RECURRENT_FIRST,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=32,
        shared_expert_intermediate_size=256,
        intermediate_size=2_048,
    )


def wide_gpt_oss() -> PretrainedConfig:
    """A window, sinks and experts."""
    return GptOssConfig(
        **_TRUNK,
        layer_types=["sliding_attention", "full_attention"],
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=512,
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=48,
    )


def wide_deepseek_v3() -> PretrainedConfig:
    """Latents and experts in groups."""
    return DeepseekV3Config(
        **_TRUNK,
        **_EXPERTS,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=512,
        kv_lora_rank=256,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        intermediate_size=2_048,
        n_routed_experts=32,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
    )


WIDE: Mapping[str, Callable[[], PretrainedConfig]] = {
    config.__name__: config
    for config in (
        wide_llama,
        wide_granite,
        wide_falcon_h1,
        wide_qwen3_next,
        wide_gpt_oss,
        wide_deepseek_v3,
    )
}
