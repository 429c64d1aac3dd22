"""The keys of the files that `sparse_conversion.py` writes, by the same reading."""

from __future__ import annotations

from collections.abc import Iterator

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
