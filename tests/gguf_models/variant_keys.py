"""The keys of the files that `variant_conversion.py` writes, by the same reading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tools.bench.gguf.container import Setting

Config = Mapping[str, Any]
_KEYS = {
    "context_length": ("max_position_embeddings", "model_max_length", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "block_count": ("num_hidden_layers", "n_layer"),
    "feed_forward_length": ("intermediate_size_mlp", "intermediate_size"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok", "num_experts_per_token"),
    "expert_group_count": ("n_group", "num_expert_group"),
    "expert_group_used_count": ("topk_group",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts"),
    "expert_weights_norm": ("norm_topk_prob", "moe_renormalize"),
    "expert_weights_scale": (
        "routed_scaling_factor",
        "route_scale",
        "router_scaling_factor",
        "moe_routed_scaling_factor",
    ),
    "attention.sliding_window": ("sliding_window",),
    "attention.scale": ("attention_multiplier",),
    "attention.value_scale": ("attention_value_scale",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
}
_LATENT = ("deepseek32", "glm-dsa", "kimi-linear", "bailingmoe3", "mistral4")
_WITH_PATTERN = ("exaone-moe", "granite_swa", "cohere2moe", "mimo2", "step35")


_LEFT_OUT = {
    "mimo2": ("expert_weights_norm", "expert_weights_scale"),
    "minicpm3": ("attention.value_length",),
}
"""Keys that the converter does not write for a model whose folder has the fields."""


def variant_keys(architecture: str, config: Config) -> Iterator[tuple[str, Setting]]:
    """The keys without the architecture's name before them, and their values."""
    for key, fields in _KEYS.items():
        for field in () if key in _LEFT_OUT.get(architecture, ()) else fields:
            if config.get(field) is not None:
                yield key, config[field]
                break
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        yield "rope.freq_base", float(rope["rope_theta"])
    if architecture in _WITH_PATTERN:
        yield from _pattern_keys(config)
    if architecture in _LATENT:
        yield from _latent_keys(config)
    yield from _own_keys(architecture, config, rope)


def _latent_keys(config: Config) -> Iterator[tuple[str, Setting]]:
    """One wide head of keys stands for all."""
    rank, turning = config["kv_lora_rank"], config["qk_rope_head_dim"]
    yield "attention.head_count_kv", 1
    yield "attention.kv_lora_rank", rank
    if config.get("q_lora_rank") is not None:
        yield "attention.q_lora_rank", config["q_lora_rank"]
    yield "attention.key_length", rank + turning
    yield "attention.value_length", rank
    yield "attention.key_length_mla", config["qk_nope_head_dim"] + turning
    yield "attention.value_length_mla", config["v_head_dim"]
    yield "rope.dimension_count", turning
    if "mlp_layer_types" in config:
        yield "leading_dense_block_count", config["mlp_layer_types"].count("dense")
    if "index_topk" in config:
        yield "attention.indexer.head_count", config["index_n_heads"]
        yield "attention.indexer.key_length", config["index_head_dim"]
        yield "attention.indexer.top_k", config["index_topk"]


def _own_keys(
    architecture: str, config: Config, rope: Mapping[str, Any]
) -> Iterator[tuple[str, Setting]]:
    match architecture:
        case "command-r":
            yield "rope.scaling.type", "none"
        case "gpt2":
            yield "feed_forward_length", 4 * config["n_embd"]
        case "chatglm":
            yield "rope.dimension_count", int(rope["partial_rotary_factor"] * config["head_dim"])
        case "mistral3":
            yield from _yarn_keys(rope)
            yield "rope.scaling.yarn_log_multiplier", rope["mscale_all_dim"]
            yield "attention.temperature_scale", rope["llama_4_scaling_beta"]
        case "mistral4":
            # The growth of queries is not among them.
            yield from _yarn_keys(rope)
            yield "rope.scaling.yarn_log_multiplier", 0.1 * rope["mscale_all_dim"]
            yield "leading_dense_block_count", config["first_k_dense_replace"]
        case "mellum":
            full, window = (rope[f"{kind}_attention"] for kind in ("full", "sliding"))
            yield "rope.freq_base", full["rope_theta"]
            yield "rope.freq_base_swa", window["rope_theta"]
            if full["rope_type"] == "yarn":
                yield from _yarn_keys(full)
            if config["sliding_window"]:
                yield from _pattern_keys(config)
        case "minicpm3":
            turning = config["qk_rope_head_dim"]
            yield "attention.q_lora_rank", config["q_lora_rank"]
            yield "attention.kv_lora_rank", config["kv_lora_rank"]
            yield "attention.key_length", config["qk_nope_head_dim"] + turning
            yield "rope.dimension_count", turning
        case "step35":
            yield from _step_keys(config)
        case "llama4":
            yield "interleave_moe_layer_step", config["interleave_moe_layer_step"]
            yield "expert_feed_forward_length", config["intermediate_size"]
        case "hy_v3":
            width = config["moe_intermediate_size"] * config["num_shared_experts"]
            yield "expert_shared_feed_forward_length", width
            yield "expert_gating_func", 2
        case "glm-dsa":
            types = [kind == "full" for kind in config["indexer_types"]]
            yield "attention.indexer.types", types
        case "kimi-linear":
            kinds = config["layer_types"]
            heads = [int(kind == "full_attention") for kind in kinds]
            yield "attention.head_count_kv", heads
            yield "ssm.conv_kernel", config["linear_conv_kernel_dim"]
            yield "kda.head_dim", config["linear_head_dim"]
        case "laguna":
            yield from _laguna_keys(config)
        case "cohere2moe":
            inner = config["intermediate_size"]
            yield "feed_forward_length", config["prefix_dense_intermediate_size"]
            yield "leading_dense_block_count", config["mlp_layer_types"].count("dense")
            yield "expert_gating_func", 2
            yield "expert_feed_forward_length", inner
            yield "expert_shared_feed_forward_length", inner * config["num_shared_experts"]
            yield "rope.dimension_count", config["head_dim"]
            yield "rope.scaling.type", "none"
        case "mimo2":
            yield from _mimo_keys(config)
        case "phimoe":
            yield "rope.dimension_count", config["hidden_size"] // config["num_attention_heads"]
            trained = rope["original_max_position_embeddings"]
            yield "rope.scaling.original_context_length", trained
            yield "rope.scaling.attn_factor", 1.0
            yield "attention.sliding_window", 0
        case "minimax-01":
            yield "residual_scale", config["full_attn_alpha_factor"]
            yield "rope.dimension_count", int(rope["partial_rotary_factor"] * config["head_dim"])
        case "minimax-m3":
            yield from _minimax_m3_keys(config, rope)
        case "bailingmoe3":
            kinds = config["layer_types"]
            heads = [int(kind == "full_attention") for kind in kinds]
            yield "attention.head_count_kv", heads
            yield "ssm.conv_kernel", config["linear_conv_kernel_dim"]
            yield "kda.head_dim", config["linear_head_dim"]
            yield "kda.safe_gate", config["kda_safe_gate"]
            yield "kda.gate_lower_bound", config["kda_lower_bound"]
            yield "expert_gating_func", 2


def _pattern_keys(config: Config) -> Iterator[tuple[str, Setting]]:
    pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
    yield "attention.sliding_window_pattern", pattern


def _yarn_keys(rope: Mapping[str, Any]) -> Iterator[tuple[str, Setting]]:
    yield "rope.scaling.type", "yarn"
    yield "rope.scaling.factor", rope["factor"]
    trained = rope["original_max_position_embeddings"]
    yield "rope.scaling.original_context_length", trained
    yield "rope.scaling.yarn_beta_fast", rope["beta_fast"]
    yield "rope.scaling.yarn_beta_slow", rope["beta_slow"]


def _laguna_keys(config: Config) -> Iterator[tuple[str, Setting]]:
    """The kinds of layers are not among them."""
    full, window = (config["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding"))
    head_dim = config["head_dim"]
    yield "attention.head_count", config["num_attention_heads_per_layer"]
    yield "rope.freq_base", full["rope_theta"]
    yield "rope.freq_base_swa", window["rope_theta"]
    yield "rope.dimension_count", int(head_dim * full["partial_rotary_factor"])
    yield "rope.dimension_count_swa", int(head_dim * window["partial_rotary_factor"])
    yield from _yarn_keys(full)
    yield "rope.scaling.yarn_attn_factor", full["attention_factor"]
    yield "expert_shared_feed_forward_length", config["shared_expert_intermediate_size"]
    yield "expert_weights_norm", True
    yield "expert_gating_func", 2
    yield "leading_dense_block_count", config["mlp_layer_types"].count("dense")


def _mimo_keys(config: Config) -> Iterator[tuple[str, Setting]]:
    """Layers with a window have twice the key heads."""
    full, window = (config["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding"))
    kv_heads = config["num_key_value_heads"]
    are_windows = [kind == "sliding_attention" for kind in config["layer_types"]]
    yield "attention.head_count_kv", [kv_heads << is_window for is_window in are_windows]
    yield "attention.value_length", config["v_head_dim"]
    yield "rope.freq_base", full["rope_theta"]
    yield "rope.freq_base_swa", window["rope_theta"]
    yield "rope.dimension_count", int(config["head_dim"] * full["partial_rotary_factor"])
    yield "expert_gating_func", 2


def _step_keys(config: Config) -> Iterator[tuple[str, Setting]]:
    """The turning part of a head is not among them."""
    full, window = (config["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding"))
    kinds = config["layer_types"]
    heads = {
        "full_attention": config["num_attention_heads"],
        "sliding_attention": config["num_sliding_attention_heads"],
    }
    yield "attention.head_count", [heads[kind] for kind in kinds]
    yield "attention.head_count_kv", [config["num_key_value_heads"]] * len(kinds)
    yield "rope.freq_base", full["rope_theta"]
    yield "rope.freq_base_swa", window["rope_theta"]
    yield "leading_dense_block_count", config["mlp_layer_types"].count("dense")
    yield "moe_every_n_layers", 1
    yield "expert_shared_feed_forward_length", config["share_expert_dim"]
    yield "expert_weights_scale", config["moe_router_scaling_factor"]
    yield "expert_weights_norm", True
    yield "expert_gating_func", 2
    for name, key in (("swiglu_limits", "exp"), ("swiglu_limits_shared", "shexp")):
        if config[name] is not None:
            yield f"swiglu_clamp_{key}", config[name]


def _minimax_m3_keys(config: Config, rope: Mapping[str, Any]) -> Iterator[tuple[str, Setting]]:
    """The numbers of the activation and the width of the shared expert are not among them."""
    yield "feed_forward_length", config["dense_intermediate_size"]
    yield "expert_feed_forward_length", config["intermediate_size"]
    yield "expert_shared_count", 1
    yield "expert_weights_norm", True
    yield "expert_gating_func", 2
    yield "leading_dense_block_count", config["mlp_layer_types"].count("dense")
    yield "rope.dimension_count", int(rope["partial_rotary_factor"] * config["head_dim"])
    yield "attention.indexer.head_count", config["index_n_heads"]
    yield "attention.indexer.key_length", config["index_head_dim"]
    yield "attention.indexer.top_k", config["index_topk_blocks"]
    yield "attention.indexer.block_size", config["index_block_size"]
    yield "attention.indexer.local_blocks", config["index_local_blocks"]
