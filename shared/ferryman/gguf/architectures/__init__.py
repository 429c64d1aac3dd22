"""The architectures of llama.cpp that are read, by the name in `general.architecture`.

A reader gives the fields of the config that the model's Hugging Face folder has, and a table has
the names of its tensors. So a family reads both as it reads a folder.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ferryman.errors import ConfigError
from ferryman.gguf.architectures import (
    centred_norms,
    delta_nets,
    gemmas,
    granite,
    mixtures,
    nemotron,
    norms_behind,
    short_convolutions,
    softmax_mixtures,
    state_spaces,
    transformer,
)
from ferryman.gguf.architectures.config_fields import Fields
from ferryman.gguf.architectures.named_tensors import named_tensors
from ferryman.gguf.architectures.tensor_names import NamedTensor, TensorNames
from ferryman.gguf.model_file import GgufFile


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """The config's fields of a model, and the tables of its tensors. `folders` are the names that
    `architectures` of its config may have."""

    fields: Callable[[GgufFile], Fields]
    names: Callable[[GgufFile], TensorNames]
    folders: tuple[str, ...]


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        transformer.llama_fields,
        transformer.llama_names,
        (
            "LlamaForCausalLM",
            "MixtralForCausalLM",
        ),
    ),
    "qwen2": GgufArchitecture(
        transformer.qwen2_fields, transformer.plain_names, ("Qwen2ForCausalLM",)
    ),
    "qwen3": GgufArchitecture(
        transformer.qwen3_fields, transformer.plain_names, ("Qwen3ForCausalLM",)
    ),
    "qwen2moe": GgufArchitecture(
        transformer.qwen2_moe_fields, transformer.qwen2_moe_names, ("Qwen2MoeForCausalLM",)
    ),
    "qwen3moe": GgufArchitecture(
        transformer.qwen3_moe_fields, transformer.qwen3_moe_names, ("Qwen3MoeForCausalLM",)
    ),
    "qwen3next": GgufArchitecture(
        delta_nets.qwen3_next_fields, delta_nets.qwen3_next_names, ("Qwen3NextForCausalLM",)
    ),
    "qwen35": GgufArchitecture(
        delta_nets.qwen3_5_fields, delta_nets.qwen3_5_names, ("Qwen3_5ForCausalLM",)
    ),
    "qwen35moe": GgufArchitecture(
        delta_nets.qwen3_5_moe_fields, delta_nets.qwen3_5_names, ("Qwen3_5MoeForCausalLM",)
    ),
    "smollm3": GgufArchitecture(
        transformer.smollm3_fields, transformer.paired_names, ("SmolLM3ForCausalLM",)
    ),
    "seed_oss": GgufArchitecture(
        transformer.seed_oss_fields, transformer.seed_oss_names, ("SeedOssForCausalLM",)
    ),
    "ernie4_5": GgufArchitecture(
        transformer.ernie_fields,
        transformer.plain_names,
        (
            "Ernie4_5ForCausalLM",
            "Ernie4_5_ForCausalLM",
        ),
    ),
    "hunyuan-dense": GgufArchitecture(
        transformer.hunyuan_fields, transformer.hunyuan_names, ("HunYuanDenseV1ForCausalLM",)
    ),
    "olmo2": GgufArchitecture(
        norms_behind.olmo2_fields,
        norms_behind.names,
        (
            "Olmo2ForCausalLM",
            "Olmo3ForCausalLM",
        ),
    ),
    "exaone4": GgufArchitecture(
        norms_behind.exaone4_fields, norms_behind.names, ("Exaone4ForCausalLM",)
    ),
    "granite": GgufArchitecture(
        granite.granite_fields, transformer.paired_names, ("GraniteForCausalLM",)
    ),
    "granitemoe": GgufArchitecture(
        granite.granite_moe_fields,
        granite.granite_moe_names,
        (
            "GraniteMoeForCausalLM",
            "GraniteMoeSharedForCausalLM",
        ),
    ),
    "granitehybrid": GgufArchitecture(
        granite.hybrid_fields, granite.hybrid_names, ("GraniteMoeHybridForCausalLM",)
    ),
    "falcon-h1": GgufArchitecture(
        state_spaces.falcon_h1_fields, state_spaces.falcon_h1_names, ("FalconH1ForCausalLM",)
    ),
    "nemotron_h": GgufArchitecture(
        nemotron.nemotron_h_fields, nemotron.nemotron_h_names, ("NemotronHForCausalLM",)
    ),
    "nemotron_h_moe": GgufArchitecture(
        nemotron.nemotron_h_fields, nemotron.nemotron_h_names, ("NemotronHForCausalLM",)
    ),
    "mamba": GgufArchitecture(
        state_spaces.mamba1_model_fields,
        state_spaces.mamba_names,
        (
            "MambaForCausalLM",
            "FalconMambaForCausalLM",
        ),
    ),
    "mamba2": GgufArchitecture(
        state_spaces.mamba2_model_fields, state_spaces.mamba2_names, ("Mamba2ForCausalLM",)
    ),
    "jamba": GgufArchitecture(
        state_spaces.jamba_fields, state_spaces.jamba_names, ("JambaForCausalLM",)
    ),
    "lfm2": GgufArchitecture(
        short_convolutions.lfm2_fields, short_convolutions.lfm2_names, ("Lfm2ForCausalLM",)
    ),
    "lfm2moe": GgufArchitecture(
        short_convolutions.lfm2_moe_fields, short_convolutions.lfm2_names, ("Lfm2MoeForCausalLM",)
    ),
    "gpt-oss": GgufArchitecture(
        mixtures.gpt_oss_fields, mixtures.gpt_oss_names, ("GptOssForCausalLM",)
    ),
    "deepseek2": GgufArchitecture(
        mixtures.deepseek_fields,
        mixtures.deepseek_names,
        (
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
        ),
    ),
    "glm4": GgufArchitecture(mixtures.glm4_fields, mixtures.glm4_names, ("Glm4ForCausalLM",)),
    "glm4moe": GgufArchitecture(
        mixtures.glm4_moe_fields, mixtures.glm4_moe_names, ("Glm4MoeForCausalLM",)
    ),
    "dots1": GgufArchitecture(mixtures.dots1_fields, mixtures.dots1_names, ("Dots1ForCausalLM",)),
    "gemma": GgufArchitecture(
        transformer.gemma1_fields, transformer.gemma1_names, ("GemmaForCausalLM",)
    ),
    "gemma2": GgufArchitecture(
        transformer.gemma2_fields, transformer.gemma_names, ("Gemma2ForCausalLM",)
    ),
    "gemma3": GgufArchitecture(
        transformer.gemma3_fields, transformer.gemma_names, ("Gemma3ForCausalLM",)
    ),
    "gemma3n": GgufArchitecture(
        gemmas.gemma3n_fields, gemmas.gemma3n_names, ("Gemma3nForCausalLM",)
    ),
    "gemma4": GgufArchitecture(gemmas.gemma4_fields, gemmas.gemma4_names, ("Gemma4ForCausalLM",)),
    "qwen3vl": GgufArchitecture(
        transformer.qwen3_fields,
        transformer.plain_names,
        (
            "Qwen3ForCausalLM",
            "Qwen3VLForConditionalGeneration",
        ),
    ),
    "qwen3vlmoe": GgufArchitecture(
        transformer.qwen3_moe_fields,
        transformer.qwen3_moe_names,
        (
            "Qwen3MoeForCausalLM",
            "Qwen3VLMoeForConditionalGeneration",
        ),
    ),
    "phi2": GgufArchitecture(
        centred_norms.phi2_fields, centred_norms.phi2_names, ("PhiForCausalLM",)
    ),
    "phi3": GgufArchitecture(
        centred_norms.phi3_fields, centred_norms.phi3_names, ("Phi3ForCausalLM",)
    ),
    "olmo": GgufArchitecture(
        centred_norms.olmo_fields, centred_norms.olmo_names, ("OlmoForCausalLM",)
    ),
    "stablelm": GgufArchitecture(
        centred_norms.stablelm_fields, centred_norms.stablelm_names, ("StableLmForCausalLM",)
    ),
    "starcoder2": GgufArchitecture(
        centred_norms.starcoder2_fields, centred_norms.starcoder2_names, ("Starcoder2ForCausalLM",)
    ),
    "gptneox": GgufArchitecture(
        centred_norms.gpt_neox_fields, centred_norms.gpt_neox_names, ("GPTNeoXForCausalLM",)
    ),
    "cohere2": GgufArchitecture(
        centred_norms.cohere2_fields, centred_norms.cohere2_names, ("Cohere2ForCausalLM",)
    ),
    "olmoe": GgufArchitecture(
        softmax_mixtures.olmoe_fields, softmax_mixtures.olmoe_names, ("OlmoeForCausalLM",)
    ),
    "minimax-m2": GgufArchitecture(
        softmax_mixtures.minimax_m2_fields,
        softmax_mixtures.minimax_m2_names,
        ("MiniMaxM2ForCausalLM",),
    ),
    "hunyuan-moe": GgufArchitecture(
        softmax_mixtures.hunyuan_moe_fields,
        softmax_mixtures.hunyuan_moe_names,
        ("HunYuanMoEV1ForCausalLM",),
    ),
    "ernie4_5-moe": GgufArchitecture(
        softmax_mixtures.ernie_moe_fields,
        softmax_mixtures.ernie_moe_names,
        ("Ernie4_5_MoeForCausalLM",),
    ),
}

# Names of llama.cpp (src/llama-arch.cpp of the tree in llama-cpp-python 0.3.36) without a reader.
_FAMILY_IS_HERE = frozenset(
    """
    afmoe apertus arcee bailingmoe3 chatglm cohere2moe deepseek32 exaone-moe glm-dsa gpt2
    granite_swa hy_v3 kimi-linear laguna llama4 mimo2 minimax-01 mistral3 phimoe
    qwen2vl
    """.split()
)
_WITHOUT_TEXT = frozenset(
    """
    bert clip eurobert gemma-embedding jina-bert-v2 jina-bert-v3 llama-embed modern-bert neo-bert
    nomic-bert nomic-bert-moe pockettts qwen3tts t5encoder wavtokenizer-dec
    """.split()
)
_DRAFTS = frozenset({"dflash", "eagle3", "gemma4-assistant"})
_DIFFUSION = frozenset({"dream", "llada", "llada-moe", "rnd1"})


def names_of(folder: Iterable[str]) -> list[str]:
    """The names of llama.cpp for models whose folders have one of these architectures."""
    wanted = set(folder)
    return [name for name, read in ARCHITECTURES.items() if wanted & set(read.folders)]


def config_of(model: GgufFile) -> Fields:
    """The fields of `config.json`. Raises ConfigError, by name, for an architecture or a key that
    is not read."""
    return _architecture(model).fields(model)


def tensors_of(model: GgufFile) -> dict[str, NamedTensor]:
    """The tensors by their names in a folder. Raises ConfigError for one that is not known."""
    return named_tensors(model, _architecture(model).names(model))


def _architecture(model: GgufFile) -> GgufArchitecture:
    name = model.metadata.architecture
    if name not in ARCHITECTURES:
        raise _refusal(model, name)
    return ARCHITECTURES[name]


def _refusal(model: GgufFile, name: str) -> ConfigError:
    refused = f"{model.metadata.file}: GGUF files of the architecture {name} are not read"
    if why := _reason(name):
        return ConfigError(f"{refused}: {why}")
    # Names that begin otherwise are of other makers, however alike they look.
    akin = [other for other in ARCHITECTURES if other[:3] == name[:3]]
    near = difflib.get_close_matches(name, akin, 1)
    nearest = f"; the nearest is {near[0]}" if near else ""
    return ConfigError(
        f"{refused}{nearest}. Read are {', '.join(ARCHITECTURES)}; a folder of safetensors may be"
    )


def _reason(architecture: str) -> str:
    """The reason why files of an architecture are not read; empty for a name that is not known."""
    if architecture in _FAMILY_IS_HERE:
        return "its keys and tensors are not known; its folder of safetensors is read"
    if architecture in _WITHOUT_TEXT:
        return "it does not write text"
    if architecture in _DRAFTS:
        return "it drafts for another model; name that one"
    if architecture in _DIFFUSION:
        return "it writes all tokens at once, not one after another"
    return ""
