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
    llama_variants,
    nemotron,
    short_convolutions,
    state_spaces,
    transformer,
)
from ferryman.gguf.architectures.config_fields import Fields
from ferryman.gguf.architectures.experts import (
    bailing_hybrid,
    cohere,
    deepseek_v4,
    grouped,
    latent,
    minimax,
    qwen4_exp,
    softmax,
    sparse_latent,
    step35,
    windowed,
)
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


def _read(
    fields: Callable[[GgufFile], Fields], names: Callable[[GgufFile], TensorNames], *folders: str
) -> GgufArchitecture:
    return GgufArchitecture(fields, names, folders)


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": _read(
        transformer.llama_fields, transformer.llama_names, "LlamaForCausalLM", "MixtralForCausalLM"
    ),
    "qwen2": _read(transformer.qwen2_fields, transformer.plain_names, "Qwen2ForCausalLM"),
    "qwen3": _read(transformer.qwen3_fields, transformer.plain_names, "Qwen3ForCausalLM"),
    "qwen2moe": _read(
        transformer.qwen2_moe_fields, transformer.qwen2_moe_names, "Qwen2MoeForCausalLM"
    ),
    "qwen3moe": _read(
        transformer.qwen3_moe_fields, transformer.qwen3_moe_names, "Qwen3MoeForCausalLM"
    ),
    "qwen3next": _read(
        delta_nets.qwen3_next_fields, delta_nets.qwen3_next_names, "Qwen3NextForCausalLM"
    ),
    "qwen35": _read(delta_nets.qwen3_5_fields, delta_nets.qwen3_5_names, "Qwen3_5ForCausalLM"),
    "qwen35moe": _read(
        delta_nets.qwen3_5_moe_fields, delta_nets.qwen3_5_names, "Qwen3_5MoeForCausalLM"
    ),
    "smollm3": _read(transformer.smollm3_fields, transformer.paired_names, "SmolLM3ForCausalLM"),
    "seed_oss": _read(
        transformer.seed_oss_fields, transformer.seed_oss_names, "SeedOssForCausalLM"
    ),
    "ernie4_5": _read(
        transformer.ernie_fields,
        transformer.plain_names,
        "Ernie4_5ForCausalLM",
        "Ernie4_5_ForCausalLM",
    ),
    "hunyuan-dense": _read(
        transformer.hunyuan_fields, transformer.hunyuan_names, "HunYuanDenseV1ForCausalLM"
    ),
    "olmo2": _read(
        llama_variants.olmo2_fields,
        llama_variants.norms_behind_names,
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
    ),
    "exaone4": _read(
        llama_variants.exaone4_fields, llama_variants.norms_behind_names, "Exaone4ForCausalLM"
    ),
    "granite": _read(granite.granite_fields, transformer.paired_names, "GraniteForCausalLM"),
    "granitemoe": _read(
        granite.granite_moe_fields,
        granite.granite_moe_names,
        "GraniteMoeForCausalLM",
        "GraniteMoeSharedForCausalLM",
    ),
    "granitehybrid": _read(
        granite.hybrid_fields, granite.hybrid_names, "GraniteMoeHybridForCausalLM"
    ),
    "falcon-h1": _read(
        state_spaces.falcon_h1_fields, state_spaces.falcon_h1_names, "FalconH1ForCausalLM"
    ),
    "nemotron_h": _read(
        nemotron.nemotron_h_fields, nemotron.nemotron_h_names, "NemotronHForCausalLM"
    ),
    "nemotron_h_moe": _read(
        nemotron.nemotron_h_fields, nemotron.nemotron_h_names, "NemotronHForCausalLM"
    ),
    "mamba": _read(
        state_spaces.mamba1_model_fields,
        state_spaces.mamba_names,
        "MambaForCausalLM",
        "FalconMambaForCausalLM",
    ),
    "mamba2": _read(
        state_spaces.mamba2_model_fields, state_spaces.mamba2_names, "Mamba2ForCausalLM"
    ),
    "jamba": _read(state_spaces.jamba_fields, state_spaces.jamba_names, "JambaForCausalLM"),
    "lfm2": _read(short_convolutions.lfm2_fields, short_convolutions.lfm2_names, "Lfm2ForCausalLM"),
    "lfm2moe": _read(
        short_convolutions.lfm2_moe_fields, short_convolutions.lfm2_names, "Lfm2MoeForCausalLM"
    ),
    "gpt-oss": _read(grouped.gpt_oss_fields, grouped.gpt_oss_names, "GptOssForCausalLM"),
    "deepseek2": _read(
        latent.deepseek_fields,
        latent.deepseek_names,
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "YoutuForCausalLM",
    ),
    "mistral4": _read(latent.mistral4_fields, latent.mistral4_names, "Mistral4ForCausalLM"),
    "glm4": _read(llama_variants.glm4_fields, llama_variants.glm4_names, "Glm4ForCausalLM"),
    "glm4moe": _read(grouped.glm4_moe_fields, grouped.glm4_moe_names, "Glm4MoeForCausalLM"),
    "dots1": _read(grouped.dots1_fields, grouped.dots1_names, "Dots1ForCausalLM"),
    "gemma": _read(transformer.gemma1_fields, transformer.gemma1_names, "GemmaForCausalLM"),
    "gemma2": _read(transformer.gemma2_fields, transformer.gemma_names, "Gemma2ForCausalLM"),
    "gemma3": _read(transformer.gemma3_fields, transformer.gemma_names, "Gemma3ForCausalLM"),
    "gemma3n": _read(gemmas.gemma3n_fields, gemmas.gemma3n_names, "Gemma3nForCausalLM"),
    "gemma4": _read(gemmas.gemma4_fields, gemmas.gemma4_names, "Gemma4ForCausalLM"),
    "qwen3vl": _read(
        transformer.qwen3_fields,
        transformer.plain_names,
        "Qwen3ForCausalLM",
        "Qwen3VLForConditionalGeneration",
    ),
    "qwen3vlmoe": _read(
        transformer.qwen3_moe_fields,
        transformer.qwen3_moe_names,
        "Qwen3MoeForCausalLM",
        "Qwen3VLMoeForConditionalGeneration",
    ),
    "phi2": _read(centred_norms.phi2_fields, centred_norms.phi2_names, "PhiForCausalLM"),
    "phi3": _read(centred_norms.phi3_fields, centred_norms.phi3_names, "Phi3ForCausalLM"),
    "olmo": _read(centred_norms.olmo_fields, centred_norms.olmo_names, "OlmoForCausalLM"),
    "stablelm": _read(
        centred_norms.stablelm_fields, centred_norms.stablelm_names, "StableLmForCausalLM"
    ),
    "starcoder2": _read(
        centred_norms.starcoder2_fields, centred_norms.starcoder2_names, "Starcoder2ForCausalLM"
    ),
    "gptneox": _read(
        centred_norms.gpt_neox_fields, centred_norms.gpt_neox_names, "GPTNeoXForCausalLM"
    ),
    "command-r": _read(cohere.command_r_fields, cohere.cohere_names, "CohereForCausalLM"),
    "cohere2": _read(cohere.cohere2_fields, cohere.cohere_names, "Cohere2ForCausalLM"),
    "olmoe": _read(softmax.olmoe_fields, softmax.olmoe_names, "OlmoeForCausalLM"),
    "minimax-m2": _read(
        softmax.minimax_m2_fields, softmax.minimax_m2_names, "MiniMaxM2ForCausalLM"
    ),
    "minimax-01": _read(
        minimax.minimax_01_fields,
        minimax.minimax_01_names,
        "MiniMaxForCausalLM",
        "MiniMaxText01ForCausalLM",
        "MiniMaxM1ForCausalLM",
    ),
    "minimax-m3": _read(
        minimax.minimax_m3_fields,
        minimax.minimax_m3_names,
        "MiniMaxM3ForCausalLM",
        "MiniMaxM3VLForCausalLM",
        "MiniMaxM3SparseForConditionalGeneration",
    ),
    "hunyuan-moe": _read(
        softmax.hunyuan_moe_fields, softmax.hunyuan_moe_names, "HunYuanMoEV1ForCausalLM"
    ),
    "ernie4_5-moe": _read(
        softmax.ernie_moe_fields, softmax.ernie_moe_names, "Ernie4_5_MoeForCausalLM"
    ),
    "arcee": _read(llama_variants.arcee_fields, transformer.paired_names, "ArceeForCausalLM"),
    "apertus": _read(
        llama_variants.apertus_fields, llama_variants.apertus_names, "ApertusForCausalLM"
    ),
    "mistral3": _read(
        llama_variants.mistral3_fields,
        transformer.paired_names,
        "Ministral3ForCausalLM",
        "Mistral3ForConditionalGeneration",
    ),
    "qwen2vl": _read(
        transformer.qwen2_fields,
        transformer.plain_names,
        "Qwen2ForCausalLM",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
    ),
    "chatglm": _read(llama_variants.chatglm_fields, llama_variants.chatglm_names, "GlmForCausalLM"),
    "minicpm3": _read(
        llama_variants.minicpm3_fields, llama_variants.minicpm3_names, "MiniCPM3ForCausalLM"
    ),
    "llama4": _read(
        llama_variants.llama4_fields,
        llama_variants.llama4_names,
        "Llama4ForCausalLM",
        "Llama4ForConditionalGeneration",
    ),
    "gpt2": _read(centred_norms.gpt2_fields, centred_norms.gpt2_names, "GPT2LMHeadModel"),
    "deepseek32": _read(
        latent.deepseek_v32_fields, latent.sparse_deepseek_names, "DeepseekV32ForCausalLM"
    ),
    "kimi-linear": _read(
        latent.kimi_linear_fields, latent.kimi_linear_names, "KimiLinearForCausalLM"
    ),
    "glm-dsa": _read(latent.glm_dsa_fields, latent.sparse_deepseek_names, "GlmMoeDsaForCausalLM"),
    "afmoe": _read(grouped.afmoe_fields, grouped.afmoe_names, "AfmoeForCausalLM"),
    "hy_v3": _read(grouped.hy_v3_fields, grouped.hy_v3_names, "HYV3ForCausalLM"),
    "laguna": _read(windowed.laguna_fields, windowed.laguna_names, "LagunaForCausalLM"),
    "cohere2moe": _read(
        cohere.cohere2_moe_fields, cohere.cohere2_moe_names, "Cohere2MoeForCausalLM"
    ),
    "mellum": _read(windowed.mellum_fields, transformer.qwen3_moe_names, "MellumForCausalLM"),
    "step35": _read(
        step35.step35_fields,
        step35.step35_names,
        "Step3p5ForCausalLM",
        "Step3p7ForConditionalGeneration",
    ),
    "mimo2": _read(windowed.mimo2_fields, windowed.mimo2_names, "MiMoV2FlashForCausalLM"),
    "phimoe": _read(
        softmax.phimoe_fields,
        softmax.phimoe_names,
        "PhimoeForCausalLM",
        "PhiMoEForCausalLM",
    ),
    "bailingmoe3": _read(
        bailing_hybrid.bailing_hybrid_fields,
        bailing_hybrid.bailing_hybrid_names,
        "BailingHybridForCausalLM",
        "BailingMoeV3ForCausalLM",
    ),
    "exaone-moe": _read(
        grouped.exaone_moe_fields,
        grouped.exaone_moe_names,
        "ExaoneMoeForCausalLM",
        "ExaoneMoEForCausalLM",
    ),
    "granite_swa": _read(
        granite.granite_swa_fields,
        granite.granite_swa_names,
        "GraniteSWAForCausalLM",
        "GraniteMoeSWAForCausalLM",
    ),
    "hy_v4": _read(sparse_latent.hy_v4_fields, sparse_latent.hy_v4_names, "HYV4ForCausalLM"),
    "dots3note": _read(
        sparse_latent.dots3_note_fields,
        sparse_latent.dots3_note_names,
        "Dots3NoteForCausalLM",
        "Dots3NoteForConditionalGeneration",
    ),
    "deepseek4": _read(
        deepseek_v4.deepseek_v4_fields, deepseek_v4.deepseek_v4_names, "DeepseekV4ForCausalLM"
    ),
    "qwen4exp": _read(
        qwen4_exp.qwen4_exp_fields,
        qwen4_exp.qwen4_exp_names,
        "Qwen4ExpForCausalLM",
        "Qwen4ExpForConditionalGeneration",
    ),
}

# Names of llama.cpp (src/llama-arch.cpp of the tree in llama-cpp-python 0.3.36) without a reader.
_WITHOUT_TEXT = frozenset(
    """
    bert eurobert gemma-embedding jina-bert-v2 jina-bert-v3 llama-embed modern-bert neo-bert
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
    if architecture == "clip":
        return "it reads images for another model (mmproj); name that one"
    if architecture in _WITHOUT_TEXT:
        return "it does not write text"
    if architecture in _DRAFTS:
        return "it drafts for another model; name that one"
    if architecture in _DIFFUSION:
        return "it writes all tokens at once, not one after another"
    return ""
