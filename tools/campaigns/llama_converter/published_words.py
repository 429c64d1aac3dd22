"""Fields of published configs that transformers 5.23 saves otherwise or not at all, and that
llama.cpp's converter asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from ferryman.model.families.dots3_note import WINDOW_SIZES

_WORDS: Mapping[str, Mapping[str, Any]] = {
    "afmoe": {"route_norm": True},
    "exaone-moe": {"scoring_func": "sigmoid"},
    "cohere2": {"rotary_pct": 1.0},
}


def published_words(architecture: str, config: PretrainedConfig) -> dict[str, Any]:
    if architecture in _WORDS:
        return dict(_WORDS[architecture])
    if architecture == "gpt2":
        return {"n_ctx": config.n_positions}
    if architecture == "kimi-linear":
        return _kimi_words(config)
    if config.model_type == "nemotron_h":
        # transformers' least step is `time_step_limit` in published code and in Ferryman.
        return {"time_step_min": 0.0}
    if architecture == "minimax-01":
        return _minimax_01_words(config)
    if architecture == "minimax-m2":
        share = config.rope_parameters.get("partial_rotary_factor", 1.0)
        return {"rotary_dim": int(share * config.head_dim)}
    if architecture in ("phi3", "phimoe"):
        return _phi_words(architecture, config)
    if config.model_type == "bamba":
        return {"attn_rotary_emb": config.hidden_size // config.num_attention_heads // 2}
    if architecture == "granitehybrid":
        kinds = {"linear_attention": "mamba", "full_attention": "attention"}
        words = {"layer_types": [kinds.get(kind, kind) for kind in config.layer_types]}
        has_experts = getattr(config, "num_local_experts", 0) > 0
        return words if has_experts else {**words, "num_experts_per_tok": 0}
    if architecture == "deepseek2" and config.model_type != "deepseek_v2":
        return {"scoring_func": "sigmoid"}
    return {}


def untyped_words(architecture: str, config: PretrainedConfig) -> dict[str, Any]:
    """Fields for the converter alone. Most are of folders whose type transformers 5.23 does not
    know, so that the converter reads config.json itself, as it has to: it does not take those that
    transformers reads for it."""
    if architecture == "mistral4":
        # The converter takes it for a part of a model with images.
        return {"architectures": ["Mistral3ForConditionalGeneration"]}
    if architecture == "mimo2":
        return _mimo_words(config)
    if architecture == "dots3note":
        return _dots3_note_words(config)
    if architecture == "step35":
        return _step_words(config)
    if architecture == "deepseek4":
        return _deepseek_v4_words(config)
    if architecture == "qwen4exp":
        kinds = [kind.replace("indexed", "full") for kind in config.layer_types]
        return {"model_type": "qwen4_exp_published", "layer_types": kinds}
    if architecture == "minimax-m3":
        return _minimax_m3_words(config)
    return _bailing_words(config) if architecture == "bailingmoe3" else {}


def _phi_words(architecture: str, config: PretrainedConfig) -> dict[str, Any]:
    rope = config.rope_parameters
    trained = rope.get("original_max_position_embeddings", config.max_position_embeddings)
    named = {"architectures": ["PhiMoEForCausalLM"]} if architecture == "phimoe" else {}
    return {"original_max_position_embeddings": trained, **named}


def _mimo_words(config: PretrainedConfig) -> dict[str, Any]:
    full, window = (config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    return {
        "model_type": "mimo_v2",
        "hybrid_layer_pattern": [int(kind != "full_attention") for kind in config.layer_types],
        "moe_layer_freq": [int(kind == "sparse") for kind in config.mlp_layer_types],
        "swa_head_dim": config.head_dim,
        "swa_num_attention_heads": config.num_attention_heads,
        "swa_num_key_value_heads": 2 * config.num_key_value_heads,
        "swa_v_head_dim": config.v_head_dim,
        "layernorm_epsilon": config.rms_norm_eps,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_parameters": None,
        "rope_theta": full["rope_theta"],
        "swa_rope_theta": window["rope_theta"],
        "partial_rotary_factor": full["partial_rotary_factor"],
    }


def _dots3_note_words(config: PretrainedConfig) -> dict[str, Any]:
    """Sizes of layers with a window have names of their own."""
    full, window = (config.rope_parameters[f"{kind}_attention"] for kind in ("indexed", "sliding"))
    fields = config.to_dict()
    sizes = {**fields, **next(iter(fields["per_layer_config"].values()))}
    return {
        "architectures": ["Dots3NoteForCausalLM"],
        "model_type": "dots3_note_published",
        "layer_types": [kind.replace("indexed", "full") for kind in config.layer_types],
        "rope_parameters": None,
        "rope_theta": full["rope_theta"],
        "sliding_window_size": config.sliding_window,
        "swa_rope_theta": window["rope_theta"],
        **{f"swa_{name}": sizes[name] for name in WINDOW_SIZES},
        "swa_qk_rope_head_dim": sizes["qk_rope_head_dim"],
        "n_routed_experts": config.num_local_experts,
        "first_k_dense_replace": config.mlp_layer_types.count("dense"),
        "apply_mla_qkv_lora_rescale": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def _step_words(config: PretrainedConfig) -> dict[str, Any]:
    """Lists with an entry for each layer."""
    kinds, sparse = config.layer_types, enumerate(config.mlp_layer_types)
    full = config.rope_parameters["full_attention"]
    ropes = [config.rope_parameters[kind] for kind in kinds]
    window_heads = config.num_sliding_attention_heads
    return {
        "architectures": ["Step3p5ForCausalLM"],
        "model_type": "step_3p5",
        "num_attention_groups": config.num_key_value_heads,
        "moe_num_experts": config.n_routed_experts,
        "moe_top_k": config.num_experts_per_tok,
        "moe_layers_enum": ",".join(str(i) for i, kind in sparse if kind == "sparse"),
        "moe_router_activation": "sigmoid",
        "norm_expert_weight": True,
        "attention_other_setting": {"num_attention_heads": window_heads},
        "rope_theta": [rope["rope_theta"] for rope in ropes],
        "partial_rotary_factors": [rope["partial_rotary_factor"] for rope in ropes],
        "rope_parameters": full,
    }


def _deepseek_v4_words(config: PretrainedConfig) -> dict[str, Any]:
    """Numbers of tokens that share a key, and one scaling, which is not that of windows alone."""
    ratios = {"sliding": 0, "compressed_sparse": 4, "heavily_compressed": 128}
    kinds = [kind.removesuffix("_attention") for kind in config.layer_types]
    turning = config.rope_parameters["compress"]
    names = ("rope_type", "factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
    return {
        "compress_ratios": [ratios[kind] for kind in kinds],
        "num_hash_layers": config.mlp_layer_types.count("hash_moe"),
        "qk_rope_head_dim": int(config.head_dim * config.partial_rotary_factor),
        "rope_parameters": None,
        "rope_scaling": {name: turning[name] for name in names},
    }


def _bailing_words(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "model_type": "bailing_moe_v3",
        "no_kda_lora": True,
        "gated_attention_proj_granularity_type": "head_wise",
        "head_dim": config.linear_head_dim,
        "num_experts_per_tok": config.num_experts_per_token,
        "n_group": config.num_expert_group,
        "norm_topk_prob": config.moe_renormalize,
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size,
        "score_function": "sigmoid",
    }


def _kimi_words(config: PretrainedConfig) -> dict[str, Any]:
    """Layers are counted from 1."""
    kinds = list(enumerate(config.layer_types, 1))
    full = [layer for layer, kind in kinds if kind == "full_attention"]
    deltas = [layer for layer, kind in kinds if kind == "linear_attention"]
    return {
        "linear_attn_config": {
            "full_attn_layers": full,
            "kda_layers": deltas,
            "num_heads": config.linear_num_heads,
            "head_dim": config.linear_head_dim,
            "short_conv_kernel_size": config.linear_conv_kernel_dim,
        },
        "first_k_dense_replace": config.mlp_layer_types.count("dense"),
        "moe_router_activation_func": "sigmoid",
    }


def _minimax_01_words(config: PretrainedConfig) -> dict[str, Any]:
    share = config.rope_parameters.get("partial_rotary_factor", 1.0)
    parts = {"full_attention": "full_attn", "linear_attention": "linear_attn", "mlp": "mlp"}
    return {
        "architectures": ["MiniMaxText01ForCausalLM"],
        "rotary_dim": int(share * config.head_dim),
        **{
            f"layernorm_{there}_{factor}": getattr(config, f"{here}_{factor}_factor")
            for there, here in parts.items()
            for factor in ("alpha", "beta")
        },
    }


def _minimax_m3_words(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m3",
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
        "moe_layer_freq": [int(kind == "sparse") for kind in config.mlp_layer_types],
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_num_index_heads": config.index_n_heads,
            "sparse_index_dim": config.index_head_dim,
            "sparse_topk_blocks": config.index_topk_blocks,
            "sparse_block_size": config.index_block_size,
            "sparse_local_block": config.index_local_blocks,
        },
    }
