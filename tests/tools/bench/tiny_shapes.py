"""Tiny models of the families that `ferryman bench` converts to GGUF, every parameter drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.tiny_models import VARIANTS, WITH_WINDOWS, save_random
from transformers import (
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    PretrainedConfig,
    Qwen3NextConfig,
)

from ferryman_bench.shape import YARN

_GRANITE = {
    "vocab_size": 131,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.7,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# The window of 32 tokens is shorter than the prompts of the tests.
_GPT_OSS = {
    name: value
    for name, value in WITH_WINDOWS["gpt_oss"].to_dict().items()
    if name != "rope_parameters"
}
TINY: Mapping[str, PretrainedConfig] = {
    "granite": GraniteConfig(**_GRANITE, attention_bias=True),
    "granite-experts": GraniteMoeConfig(**_GRANITE, num_local_experts=4, num_experts_per_tok=2),
    "granite-hybrid": VARIANTS["granite_nope"],
    "granite-hybrid-experts": type(VARIANTS["granite_moe"])(
        **{**VARIANTS["granite_moe"].to_dict(), "mamba_proj_bias": False}
    ),
    "bamba": VARIANTS["bamba"],
    "qwen3-next": Qwen3NextConfig(
        vocab_size=131,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        # Two value heads of each key head, so that their order shows.
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        intermediate_size=64,
        max_position_embeddings=512,
    ),
    "gpt-oss": GptOssConfig(**{**_GPT_OSS, "rope_parameters": YARN}),
}


def save_tiny(folder: Path, name: str) -> None:
    """Saves the model with random weights in float32."""
    save_random(folder, TINY[name], seed=0)
