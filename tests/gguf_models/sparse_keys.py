"""The keys of the files that `sparse_conversion.py` writes, by the same reading."""

from __future__ import annotations

from collections.abc import Iterator

from tests.gguf_models.qwen4_conversion import qwen4_keys
from tests.gguf_models.variant_keys import Config, variant_keys
from tools.bench.gguf.container import Setting


def sparse_keys(architecture: str, config: Config) -> Iterator[tuple[str, Setting]]:
    """The keys without the architecture's name before them, and their values."""
    match architecture:
        case "hy_v4":
            # A converter writes the sizes of DeepSeek 3.2's attention first.
            yield from variant_keys("deepseek32", config)
            yield from _hy_v4_keys(config)
        case "dots3note":
            yield from variant_keys("deepseek32", config)
            yield from _dots3_note_keys(config)
        case "deepseek4":
            yield from variant_keys("deepseek4", config)
            yield from _deepseek_v4_keys(config)
        case "qwen4exp":
            yield from qwen4_keys(config)


def _hy_v4_keys(config: Config) -> Iterator[tuple[str, Setting]]:
    yield "expert_gating_func", 2
    yield "swiglu_clamp_exp", [config["swiglu_limit"]] * config["num_hidden_layers"]
    yield "hyper_connection.count", config["hc_mult"]
    yield "hyper_connection.epsilon", config["hc_eps"]
    yield "hyper_connection.magnitude", config["hc_magnitude"]
    yield "attention.indexer.types", [kind == "full" for kind in config["indexer_types"]]


def _dots3_note_keys(config: Config) -> Iterator[tuple[str, Setting]]:
    """Sizes of layers with a window have keys of their own, but for their heads."""
    are_windows = [kind == "sliding_attention" for kind in config["layer_types"]]
    sizes = {**config, **next(iter(config["per_layer_config"].values()))}
    rank, turning = sizes["kv_lora_rank"], sizes["qk_rope_head_dim"]
    heads = (config["num_attention_heads"], sizes["num_attention_heads"])
    full, window = (
        config["rope_parameters"][f"{kind}_attention"] for kind in ("indexed", "sliding")
    )
    yield "attention.head_count", [heads[is_window] for is_window in are_windows]
    yield "rope.freq_base", full["rope_theta"]
    yield "rope.freq_base_swa", window["rope_theta"]
    yield "attention.sliding_window_pattern", are_windows
    yield "attention.kv_lora_rank_swa", rank
    yield "attention.key_length_swa", rank + turning
    yield "attention.value_length_swa", rank
    yield "attention.key_length_mla_swa", sizes["qk_nope_head_dim"] + turning
    yield "attention.value_length_mla_swa", sizes["v_head_dim"]
    yield "attention.indexer.types", [not is_window for is_window in are_windows]
    yield "expert_gating_func", 2


def _deepseek_v4_keys(config: Config) -> Iterator[tuple[str, Setting]]:
    """The numbers of tokens that share a key have one more, of the layer for drafts."""
    ratios = {"sliding": 0, "compressed_sparse": 4, "heavily_compressed": 128}
    limits = [config["swiglu_limit"]] * config["num_hidden_layers"]
    turning = config["rope_parameters"]["compress"]
    yield "rope.freq_base", config["rope_theta"]
    yield "rope.dimension_count", int(config["head_dim"] * config["partial_rotary_factor"])
    yield "rope.scaling.type", "yarn"
    yield "rope.scaling.factor", turning["factor"]
    yield "rope.scaling.original_context_length", turning["original_max_position_embeddings"]
    yield "rope.scaling.yarn_beta_fast", float(turning["beta_fast"])
    yield "rope.scaling.yarn_beta_slow", float(turning["beta_slow"])
    yield "attention.q_lora_rank", config["q_lora_rank"]
    yield "attention.indexer.head_count", config["index_n_heads"]
    yield "attention.indexer.key_length", config["index_head_dim"]
    yield "attention.indexer.top_k", config["index_topk"]
    yield "attention.output_group_count", config["o_groups"]
    yield "attention.output_lora_rank", config["o_lora_rank"]
    kinds = [kind.removesuffix("_attention") for kind in config["layer_types"]]
    yield "attention.compress_ratios", [*(ratios[kind] for kind in kinds), 0]
    yield "attention.compress_rope_freq_base", config["compress_rope_theta"]
    yield "expert_gating_func", 4
    yield "expert_shared_count", 1
    yield "swiglu_clamp_exp", limits
    yield "swiglu_clamp_shexp", limits
    yield "hyper_connection.count", config["hc_mult"]
    yield "hyper_connection.sinkhorn_iterations", config["hc_sinkhorn_iters"]
    yield "hyper_connection.epsilon", config["hc_eps"]
    yield "hash_layer_count", config["mlp_layer_types"].count("hash_moe")
