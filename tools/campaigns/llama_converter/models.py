"""Tiny models for llama.cpp's converter, each with a published vocabulary of its family or another.

The configs are those of `tests/gguf_models` and `tests/tools/bench`, and more of each architecture
where a field has a second value that a converter treats otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.gguf_models.hybrid_models import _LATENT, HYBRIDS
from tests.gguf_models.sparse_models import SPARSE
from tests.gguf_models.test_architectures import MODELS, SIZES
from tests.gguf_models.variant_models import VARIANTS as MORE_VARIANTS
from tests.model.comparison import FAMILIES, architecture_of, random_config
from tests.tiny_models import VARIANTS
from tests.tools.bench.tiny_shapes import TINY
from tools.campaigns.llama_converter.published_words import published_words, untyped_words
from transformers import (
    DeepseekV3Config,
    Glm4MoeLiteConfig,
    GraniteMoeSharedConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from ferryman.gguf.architectures import names_of

BENCH = {
    "granite": "granite",
    "granite-experts": "granitemoe",
    "granite-hybrid": "granitehybrid",
    "granite-hybrid-experts": "granitehybrid",
}
PIECES = (
    *("gemma", "gemma2", "gemma3", "gemma3n", "ernie4_5", "ernie4_5-moe", "jamba"),
    *("phi3", "phimoe", "minicpm3"),
)
"""Architectures whose converter reads a `tokenizer.model`."""
DRAFTS = ("qwen3next", "qwen35", "qwen35moe", "mimo2", "bailingmoe3")
"""Architectures whose converter wants layers for drafts unless it is told that there are none."""
DENSE_APART: Mapping[str, Mapping[str, str]] = {
    "kimi-linear": {
        f"block_sparse_moe.{part}_proj": f"mlp.{part}_proj" for part in ("gate", "up", "down")
    }
}
"""Words of names that transformers 5.23 saves, and those of published folders."""
COMPUTED: Mapping[str, tuple[str, ...]] = {"minimax-01": ("slope_rate", "_decay")}
"""Endings of tensors that transformers 5.23 saves and published folders do not have."""
GLM_TOKENS = ("<|user|>", "[gMASK]", "<|observation|>")
"""Tokens that the converter of these models asks for."""
DOTS_TOKENS = ("<|endofassistant|>",)
PLAIN, WITH_PIECES, QWEN, GEMMA = "smollm2", "llama2", "qwen3", "gemma3"


def _changed(config: PretrainedConfig, **fields: Any) -> PretrainedConfig:
    return type(config)(**{**config.to_dict(), **fields})


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
_LINEAR = {"rope_type": "linear", "factor": 4.0}
_SIZES = {**SIZES, "num_hidden_layers": 2}
_MORE: Mapping[str, tuple[str, PretrainedConfig]] = {
    "llama 3.1": (
        "llama",
        LlamaConfig(**_SIZES, rope_parameters=_LLAMA3, tie_word_embeddings=True),
    ),
    "llama, linear": (
        "llama",
        LlamaConfig(**_SIZES, rope_parameters={**_LINEAR, "rope_theta": 10_000.0}),
    ),
    "mistral": ("llama", MistralConfig(**_SIZES, sliding_window=None)),
    "mixtral": ("llama", MixtralConfig(**_SIZES, num_local_experts=4, sliding_window=None)),
    "qwen3, yarn": ("qwen3", Qwen3Config(**_SIZES, rope_parameters=_YARN)),
    "gemma2, another scale": (
        "gemma2",
        _changed(MODELS["gemma2"], head_dim=32, query_pre_attn_scalar=32),
    ),
    "gemma3, another base": (
        "gemma3",
        _changed(
            MODELS["gemma3"],
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {
                    "rope_type": "linear",
                    "rope_theta": 1_000_000.0,
                    "factor": 8.0,
                },
            },
        ),
    ),
    "olmo3, yarn": (
        "olmo2",
        _changed(MODELS["olmo2 of OLMo 3"], rope_parameters={**_YARN, "attention_factor": None}),
    ),
    "deepseek 3, yarn": (
        "deepseek2",
        _changed(
            HYBRIDS["deepseek 3"][1],
            rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        ),
    ),
    "granite-hybrid of attention": (
        "granitehybrid",
        _changed(TINY["granite-hybrid"], layer_types=["full_attention"] * 5),
    ),
    "nemotron_h_moe, wide heads": (
        "nemotron_h_moe",
        _changed(HYBRIDS["nemotron_h_moe"][1], head_dim=32, moe_latent_size=24),
    ),
    "falcon-h1, no norm": ("falcon-h1", _changed(HYBRIDS["falcon-h1"][1], mamba_rms_norm=False)),
    "bamba": ("granitehybrid", VARIANTS["bamba"]),
    "bamba, groups": ("granitehybrid", VARIANTS["bamba_groups"]),
    "glm4_moe_lite": ("deepseek2", Glm4MoeLiteConfig(**_LATENT)),
    "deepseek 3, no query rank": (
        "deepseek2",
        DeepseekV3Config(**{**_LATENT, "q_lora_rank": None}),
    ),
    "granitemoeshared": (
        "granitemoe",
        GraniteMoeSharedConfig(
            **{**TINY["granite-experts"].to_dict(), "shared_intermediate_size": 80}
        ),
    ),
    "minimax-01, whole heads turn": (
        "minimax-01",
        _changed(
            MORE_VARIANTS["minimax-01"][1],
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        ),
    ),
    "minimax-m3, all blocks": (
        "minimax-m3",
        _changed(MORE_VARIANTS["minimax-m3"][1], index_topk_blocks=5),
    ),
    "jamba, no experts": ("jamba", _changed(HYBRIDS["jamba"][1], num_experts=1)),
    "command-r, 64 layers": (
        "command-r",
        _changed(MORE_VARIANTS["command-r"][1], num_hidden_layers=64, use_qk_norm=True),
    ),
    "mistral4, its first context": (
        "mistral4",
        _changed(
            MORE_VARIANTS["mistral4"][1],
            rope_parameters={
                **MORE_VARIANTS["mistral4"][1].rope_parameters,
                "original_max_position_embeddings": 64,
            },
        ),
    ),
    "mellum, one base": (
        "mellum",
        _changed(
            MORE_VARIANTS["mellum"][1],
            rope_parameters={
                **MORE_VARIANTS["mellum"][1].rope_parameters,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0},
            },
        ),
    ),
    "lfm2, tied": ("lfm2", _changed(HYBRIDS["lfm2"][1], tie_word_embeddings=True)),
}
"""More of the same architectures, for fields with a second value."""


@dataclass(frozen=True, slots=True)
class ConvertedModel:
    """A config, llama.cpp's name of its architecture, and the vocabulary that the folder gets."""

    architecture: str
    config: PretrainedConfig

    @property
    def words(self) -> Mapping[str, Any]:
        """Fields of `config.json` as published configs have them, unlike those of transformers."""
        return published_words(self.architecture, self.config)

    @property
    def untyped_words(self) -> Mapping[str, Any]:
        """Fields for the converter alone, which transformers would not read."""
        return untyped_words(self.architecture, self.config)

    @property
    def vocabulary(self) -> str:
        if self.architecture.startswith("gemma"):
            return GEMMA
        if self.architecture in PIECES:
            return WITH_PIECES
        # transformers gives every Qwen 2 the division of its own.
        return QWEN if self.architecture in ("qwen2", "qwen2vl", "qwen35moe") else PLAIN

    @property
    def more_tokens(self) -> tuple[str, ...]:
        if self.architecture == "dots3note":
            return DOTS_TOKENS
        return GLM_TOKENS if self.config.model_type.startswith("glm") else ()

    @property
    def has_drafts_to_refuse(self) -> bool:
        return self.architecture in DRAFTS

    def sized(self, num_tokens: int, bos: int, eos: int) -> PretrainedConfig:
        """The config with as many tokens as the vocabulary, and its ends."""
        fields: dict[str, Any] = {
            **self.config.to_dict(),
            "vocab_size": -(-(num_tokens + len(self.more_tokens)) // 16) * 16,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": eos,
        }
        if getattr(self.config, "vocab_size_per_layer_input", 0):
            fields["vocab_size_per_layer_input"] = fields["vocab_size"]
        return type(self.config)(**fields)


def converted_models() -> Mapping[str, ConvertedModel]:
    """All models by their names."""
    plain = {name: (name.split()[0], config) for name, config in MODELS.items()}
    by_bench = {name: (there, TINY[name]) for name, there in BENCH.items()}
    there = {**plain, **by_bench, **HYBRIDS, **MORE_VARIANTS, **SPARSE, **_MORE}
    return {name: ConvertedModel(*model) for name, model in there.items()}


def random_models(seeds: range) -> Mapping[str, ConvertedModel]:
    """Random configs of each family that has a reader, by its name and the seed."""
    models: dict[str, ConvertedModel] = {}
    for family in FAMILIES:
        for seed in seeds:
            config = random_config(family, seed)
            if architectures := names_of([architecture_of(config)]):
                models[f"{family}-{seed}"] = ConvertedModel(architectures[0], config)
    return models
