from __future__ import annotations

import random
from typing import Any

from tests.model.families.shapes import VOCAB_SIZE, experts, grouped_heads, pattern, trunk
from transformers import PretrainedConfig, Qwen4ExpTextConfig

LAYER_TYPES = ["linear_attention", "full_attention"]


def qwen4_exp(rng: random.Random) -> PretrainedConfig:
    """Two or three streams; an index that chooses one, few or all blocks, which pages divide or
    not; n-grams in no layer, in one or in two, that end at a separator which prompts have."""
    num_layers = rng.randint(1, 4)
    layer_types = pattern(rng, num_layers, LAYER_TYPES)
    head_dim, rotary_dim = rng.choice([8, 16]), rng.choice([4, 8])
    k_heads, length = rng.choice([1, 2, 3]), rng.choice([3, 4, 8, 16])
    rotary = {"rope_type": "default", "rope_theta": rng.choice([1e2, 1e4])}
    rotary |= {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
    shared = {**trunk(rng, num_layers), **grouped_heads(rng), "head_dim": head_dim}
    return Qwen4ExpTextConfig(
        **{**shared, **_ngrams(rng, layer_types)},
        **experts(rng),
        hidden_size=rng.choice([24, 40]),
        attention_bias=rng.random() < 0.5,
        layer_types=layer_types,
        rope_parameters={**rotary, "partial_rotary_factor": rotary_dim / head_dim},
        linear_num_key_heads=k_heads,
        linear_num_value_heads=k_heads * rng.choice([1, 2, 3]),
        linear_key_head_dim=rng.choice([4, 7, 16]),
        linear_value_head_dim=rng.choice([4, 9, 16]),
        linear_conv_kernel_dim=rng.choice([2, 3, 4]),
        norm_topk_prob=rng.random() < 0.5,
        shared_expert_intermediate_size=rng.choice([8, 24]),
        output_gate_type=rng.choice([None, "silu", "sigmoid"]),
        hc_count=rng.choice([2, 3]),
        hc_lowrank=rng.choice([5, 12]),
        indexer_n_heads=rng.choice([1, 4, 16]),
        indexer_kv_heads=1,
        indexer_head_dim=rng.choice([8, 12, 24]),
        indexer_compress_ratio=length,
        indexer_budget=length * rng.choice([1, 2, 3, 8, 200]),
    )


def _ngrams(rng: random.Random, layer_types: list[str]) -> dict[str, Any]:
    order, heads = rng.choice([2, 3, 4]), rng.choice([1, 2, 3])
    able = [number for number, word in enumerate(layer_types, 1) if word == LAYER_TYPES[0]]
    return {
        "ple_layer_ids": rng.sample(able, min(len(able), rng.choice([0, 1, 2]))),
        "ple_embed_dim": (order - 1) * heads * rng.choice([2, 5]),
        "ple_conv_kernel_size": rng.choice([2, 3, 4]),
        "ngram_size": order,
        "heads_per_ngram": heads,
        "ngram_vocab_size_base": rng.choice([11, 50]),
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": rng.choice([1, 2, 4]),
        "seed": rng.choice([0, 1234]),
        "eos_token_id": rng.randrange(VOCAB_SIZE),
    }
