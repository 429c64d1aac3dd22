"""Tiny models whose attention is at places that an index chooses: llama.cpp's name of each, and a
config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.gguf_models.hybrid_models import _DELTA, _ENDS, _LATENT, _SHARED, _THREE_AXES
from tests.model.families.hy_v4 import HALVES
from transformers import DeepseekV4Config, HYV4Config, PretrainedConfig, Qwen4ExpTextConfig
from transformers.models.dots3_note import Dots3NoteTextConfig

Fields = Mapping[str, Any]

_INDEX: Fields = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8}
_ELSEWHERE = ("n_routed_experts", "first_k_dense_replace")
"""Fields that a config of dots3 note says otherwise."""
_TURNING: Fields = {"rope_type": "default", "rope_theta": 10_000.0}

_WINDOWS: Fields = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "head_dim": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
"""Sizes of layers with a window, which turn as many channels as others."""
_INDEXED, _WINDOW = "indexed_attention", "sliding_attention"
_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"

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
            **HALVES,
        ),
    ),
    "dots3note": (
        "dots3note",
        Dots3NoteTextConfig(
            **{name: value for name, value in _LATENT.items() if name not in _ELSEWHERE},
            **{**_INDEX, "index_head_dim": 64},
            num_local_experts=4,
            shared_experts_intermediate_size=32,
            head_dim=24,
            layer_types=[_INDEXED, _WINDOW, _INDEXED, _WINDOW],
            mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
            sliding_window=32,
            per_layer_config=dict.fromkeys((1, 3), _WINDOWS),
            rope_parameters={_INDEXED: {**_TURNING, "rope_theta": 8e7}, _WINDOW: _TURNING},
        ),
    ),
    "deepseek4": (
        "deepseek4",
        DeepseekV4Config(
            **_ENDS,
            **{**_INDEX, "index_head_dim": 64},
            vocab_size=136,
            hidden_size=64,
            num_hidden_layers=5,
            max_position_embeddings=1024,
            num_attention_heads=4,
            head_dim=32,
            partial_rotary_factor=0.5,
            q_lora_rank=32,
            o_groups=2,
            o_lora_rank=16,
            sliding_window=32,
            layer_types=[_WINDOW, _SPARSE, _HEAVY, _SPARSE, _HEAVY],
            mlp_layer_types=["hash_moe", "hash_moe", "moe", "moe", "moe"],
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            swiglu_limit=0.5,
            hc_mult=4,
            hc_sinkhorn_iters=4,
            hc_eps=1e-4,
            rope_theta=10_000.0,
            compress_rope_theta=160_000.0,
            rope_parameters={
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 256,
            },
        ),
    ),
    "qwen4exp": (
        "qwen4exp",
        Qwen4ExpTextConfig(
            **_ENDS,
            **_SHARED,
            **_DELTA,
            **_THREE_AXES,
            vocab_size=136,
            hidden_size=64,
            num_hidden_layers=4,
            max_position_embeddings=1024,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            rms_norm_eps=1e-5,
            output_gate_type="sigmoid",
            hc_count=3,
            hc_lowrank=32,
            indexer_n_heads=4,
            indexer_kv_heads=1,
            indexer_head_dim=16,
            indexer_compress_ratio=4,
            indexer_budget=32,
            ple_layer_ids=[2],
            ngram_size=3,
            heads_per_ngram=2,
            ngram_vocab_size_base=50,
            make_ngram_vocab_size_divisible_by=8,
            split_ngram_parts=2,
        ),
    ),
}
