"""The keys of tiny hybrids and mixtures as GGUF files, by a second reading of llama.cpp's converter
(`hybrid_conversion.py` names it)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.gguf_models.gemma_parts import gemma_keys
from tools.bench.gguf.container import Setting

Config = Mapping[str, Any]
_KEYS = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.sliding_window": ("sliding_window",),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
    ),
    "expert_shared_count": ("n_shared_experts",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers"),
    "shortconv.l_cache": ("conv_L_cache",),
}


def common_keys(config: Config) -> dict[str, Setting]:
    keys = {
        key: next(config[field] for field in fields if config.get(field) is not None)
        for key, fields in _KEYS.items()
        if any(config.get(field) is not None for field in fields)
    }
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        keys["rope.freq_base"] = float(rope["rope_theta"])
    return keys


def own_keys(architecture: str, config: Config) -> dict[str, Setting]:
    """Keys that depend on the architecture, after those that all have."""
    hidden, num_layers = config["hidden_size"], config.get("num_hidden_layers", 0)
    match architecture:
        case "qwen3next" | "qwen35" | "qwen35moe":
            values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
            turning = config["rope_parameters"]["partial_rotary_factor"] * config["head_dim"]
            types = [kind == "linear_attention" for kind in config["layer_types"]]
            return {
                **_ssm(config["linear_conv_kernel_dim"], values, config["linear_key_head_dim"]),
                "ssm.time_step_rank": config["linear_num_value_heads"],
                "ssm.group_count": config["linear_num_key_heads"],
                "rope.dimension_count": int(turning),
                "attention.recurrent_layers": types,
                "rope.dimension_sections": [2, 1, 1, 0],
            }
        case "mamba" | "jamba":
            is_jamba = architecture == "jamba"
            names = ("mamba_d_conv", "mamba_d_state", "mamba_dt_rank")
            names = names if is_jamba else ("conv_kernel", "state_size", "time_step_rank")
            conv, state, rank = (config[name] for name in names)
            inner = (config["mamba_expand"] if is_jamba else config["expand"]) * hidden
            keys = {**_ssm(conv, inner, state), "ssm.time_step_rank": rank}
            if not is_jamba:
                is_normed = config["model_type"] == "falcon_mamba"
                return {**keys, **_mixer_keys(config), "ssm.dt_b_c_rms": is_normed}
            period, offset = config["attn_layer_period"], config["attn_layer_offset"]
            heads = [
                config["num_key_value_heads"] if layer % period == offset else 0
                for layer in range(num_layers)
            ]
            return {**keys, "attention.head_count_kv": heads}
        case "mamba2":
            return {
                **_ssm(config["conv_kernel"], config["expand"] * hidden, config["state_size"]),
                **_mixer_keys(config),
                "ssm.time_step_rank": config["num_heads"],
                "ssm.group_count": config["n_groups"],
            }
        case "falcon-h1":
            sizes = config["mamba_d_conv"], config["mamba_d_ssm"], config["mamba_d_state"]
            return {
                **_ssm(*sizes),
                "ssm.time_step_rank": config["mamba_d_ssm"] // config["mamba_d_head"],
                "ssm.group_count": config["mamba_n_groups"],
            }
        case "nemotron_h" | "nemotron_h_moe":
            return _nemotron_keys(config)
        case "lfm2" | "lfm2moe":
            types = config["layer_types"]
            counts = [config["num_key_value_heads"] if "attention" in t else 0 for t in types]
            keys = {"attention.head_count_kv": counts, "feed_forward_length": _lfm2_width(config)}
            return keys if architecture == "lfm2" else {**keys, "expert_gating_func": 2}
        case "gpt-oss":
            rope = config["rope_parameters"]
            return {
                "expert_feed_forward_length": config["intermediate_size"],
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": rope["factor"],
                "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
                "rope.scaling.yarn_beta_fast": rope["beta_fast"],
                "rope.scaling.yarn_beta_slow": rope["beta_slow"],
            }
        case "deepseek2":
            return _latent_keys(config)
        case "glm4moe":
            turning = config["rope_parameters"]["partial_rotary_factor"] * config["head_dim"]
            return {"rope.dimension_count": int(turning), "expert_gating_func": 2}
        case "gemma3n" | "gemma4":
            return gemma_keys(architecture, config)
        case _:
            return {}


def _ssm(conv: int, inner: int, state: int) -> dict[str, Setting]:
    return {"ssm.conv_kernel": conv, "ssm.inner_size": inner, "ssm.state_size": state}


def _mixer_keys(config: Config) -> dict[str, Setting]:
    """Those of a model of mixers alone."""
    return {
        "context_length": 2**20,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
    }


def _nemotron_keys(config: Config) -> dict[str, Setting]:
    words = config["layers_block_type"]
    inner = config["mamba_num_heads"] * config["mamba_head_dim"]
    width = config["moe_intermediate_size" if "moe" in words else "intermediate_size"]
    return {
        **_ssm(config["conv_kernel"], inner, config["ssm_state_size"]),
        "block_count": len(words),
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        "ssm.time_step_rank": config["mamba_num_heads"],
        "ssm.group_count": config["n_groups"],
        "attention.head_count_kv": [
            config["num_key_value_heads"] if "attention" in word and "linear" not in word else 0
            for word in words
        ],
        **(
            {}
            if "moe" in words
            else {"expert_count": 0, "expert_used_count": 0, "expert_group_count": 0}
        ),
        "feed_forward_length": [width if word in ("mlp", "moe") else 0 for word in words],
    }


def _latent_keys(config: Config) -> dict[str, Setting]:
    """Latent attention as attention with one key head."""
    latent, turning = config["kv_lora_rank"], config["qk_rope_head_dim"]
    keys: dict[str, Setting] = {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + turning,
        "attention.value_length": latent,
        "attention.key_length_mla": config["qk_nope_head_dim"] + turning,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": turning,
    }
    return keys if config["model_type"] == "deepseek_v2" else {**keys, "expert_gating_func": 2}


def _lfm2_width(config: Config) -> int:
    width = config["intermediate_size"]
    if not config.get("block_auto_adjust_ff_dim"):
        return int(width)
    width = int(config["block_ffn_dim_multiplier"] * int(2 * width / 3))
    multiple = config["block_multiple_of"]
    return int(multiple * ((width + multiple - 1) // multiple))
