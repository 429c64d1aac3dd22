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


def _hy_v4_keys(config: Config) -> Iterator[tuple[str, Setting]]:
    yield "expert_gating_func", 2
    yield "swiglu_clamp_exp", [config["swiglu_limit"]] * config["num_hidden_layers"]
    yield "hyper_connection.count", config["hc_mult"]
    yield "hyper_connection.epsilon", config["hc_eps"]
    yield "hyper_connection.magnitude", config["hc_magnitude"]
    yield "attention.indexer.types", [kind == "full" for kind in config["indexer_types"]]
