"""The model families: which models there are, and who reads their configs and loads their weights.

A file holds what one maker's families, or families of one form, share. Every family is listed here,
once; tables of the docs and tests take it from here. docs/adding-a-family.md is the recipe.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.model.families import (
    arcee,
    cohere,
    deepseek,
    deepseek_v4,
    dense_latent,
    dots3_note,
    ernie,
    exaone,
    falcon_h1,
    gemma,
    gemma3n,
    gemma4,
    glm,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    hunyuan,
    hy_v4,
    inkling,
    jamba,
    jetmoe,
    kimi_linear,
    kolibri,
    laguna,
    lfm,
    lfm3,
    ling3,
    ling25,
    llama,
    longcat_flash,
    mamba,
    mimo,
    minimax,
    minimax_m3,
    mistral,
    mistral4,
    native,
    nemotron_h,
    olmo,
    phi,
    qwen,
    qwen4_exp,
    qwen_hybrid,
    qwen_variants,
    recurrent_gemma,
    rwkv,
    step3p7,
    transformer_variants,
    xlstm,
    zamba,
    zamba2,
    zaya,
)
from ferryman.model.layers.decoder import Decoder
from ferryman.model.layers.mtp import MtpSource
from ferryman.model.layers.transformer import load_text_transformer, load_transformer
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.model_shapes import ModelConfig
from ferryman.model.weights.named_weights import Weights
from ferryman.model.weights.quantisation.mxfp4 import METHOD as MXFP4
from ferryman.model.weights.weight_formats import LINEAR_METHODS

Config = TypeVar("Config", bound=ModelConfig)

PAGES_OF_ALL = (Kind.FULL,)
WINDOWED = (Kind.FULL, Kind.WINDOW)
HYBRID = (Kind.FULL, Kind.RECURRENT)
WINDOWED_HYBRID = (Kind.WINDOW, Kind.RECURRENT)
RECURRENT = (Kind.RECURRENT,)
EVERY_KIND = tuple(Kind)


@dataclass(frozen=True, slots=True)
class Family(Generic[Config]):
    """`name` is the family's in tables and tests, `architectures` are the names in config.json,
    `kinds` those of state that its models may keep.

    `read` raises ConfigError, by field name, for an unsupported config. `load` raises it for a
    tensor that is missing or has another shape than the config implies. `quantisations` are the
    values of `quant_method` that it can load. `mtp` is None if checkpoints cannot draft for
    themselves. `text_type` is the "model_type" of a "text_config" that makes a folder this
    family's, where the architecture is that of several families ("": there is none).
    """

    name: str
    architectures: tuple[str, ...]
    read: Callable[[ConfigFields], Config]
    load: Callable[[Config, StateManifest, Weights], Decoder]
    kinds: tuple[Kind, ...] = PAGES_OF_ALL
    quantisations: tuple[str, ...] = LINEAR_METHODS
    mtp: MtpSource[Config] | None = None
    text_type: str = ""

    @property
    def file(self) -> str:
        """The name of the file that reads the family's configs."""
        return self.read.__module__.rpartition(".")[2]

    @property
    def summary(self) -> str:
        """The sentence that says what the models are: the first line of the reader's docstring, or
        of the file's if it has one family."""
        text = self.read.__doc__ or sys.modules[self.read.__module__].__doc__
        return str(text).partition("\n")[0].rstrip(".")

    @property
    def formats(self) -> str:
        """The quantisations that it loads, for a table."""
        if self.quantisations == LINEAR_METHODS:
            return "any"
        return ", ".join(("plain", *self.quantisations))


FAMILIES: tuple[Family[Any], ...] = (
    Family("llama", ("LlamaForCausalLM",), llama.read_llama, load_transformer),
    Family(
        "smollm3", ("SmolLM3ForCausalLM",), llama.read_smollm3, load_transformer, kinds=WINDOWED
    ),
    Family("cwm", ("CwmForCausalLM",), llama.read_cwm, load_transformer, kinds=WINDOWED),
    Family("arcee", ("ArceeForCausalLM",), arcee.read_arcee, arcee.load_arcee),
    Family("seed_oss", ("SeedOssForCausalLM",), llama.read_seed_oss, load_transformer),
    Family("hunyuan", ("HunYuanDenseV1ForCausalLM",), hunyuan.read_hunyuan, load_transformer),
    Family(
        "hunyuan_moe",
        ("HunYuanMoEV1ForCausalLM",),
        hunyuan.read_hunyuan_moe,
        hunyuan.load_hunyuan_moe,
    ),
    Family("hy_v3", ("HYV3ForCausalLM",), hunyuan.read_hy_v3, hunyuan.load_hy_v3),
    Family("gpt2", ("GPT2LMHeadModel",), gpt2.read_gpt2, gpt2.load_gpt2, quantisations=()),
    Family("gpt_neox", ("GPTNeoXForCausalLM",), gpt_neox.read_gpt_neox, gpt_neox.load_gpt_neox),
    Family(
        "llama4",
        ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
        llama.read_llama4,
        llama.load_llama4,
        kinds=WINDOWED,
    ),
    Family(
        "qwen2",
        (
            "Qwen2ForCausalLM",
            "Qwen2VLForConditionalGeneration",
            "Qwen2_5_VLForConditionalGeneration",
        ),
        qwen.read_qwen2,
        load_text_transformer,
        kinds=WINDOWED,
    ),
    Family(
        "qwen2_moe", ("Qwen2MoeForCausalLM",), qwen.read_qwen2_moe, load_transformer, kinds=WINDOWED
    ),
    Family(
        "qwen3",
        ("Qwen3ForCausalLM", "Qwen3VLForConditionalGeneration"),
        qwen.read_qwen3,
        load_text_transformer,
        kinds=WINDOWED,
    ),
    Family(
        "qwen3_moe",
        ("Qwen3MoeForCausalLM", qwen.MOE_WITH_IMAGES),
        qwen.read_qwen3_moe,
        load_text_transformer,
        kinds=WINDOWED,
    ),
    Family(
        "mellum",
        ("MellumForCausalLM",),
        qwen_variants.read_mellum,
        load_transformer,
        kinds=WINDOWED,
    ),
    Family(
        "flint",
        ("FlintForCausalLM",),
        qwen_variants.read_flint,
        qwen_variants.load_flint,
        kinds=WINDOWED,
    ),
    Family(
        "qwen3_next",
        ("Qwen3NextForCausalLM",),
        qwen_hybrid.read_qwen3_next,
        qwen_hybrid.load_qwen_hybrid,
        mtp=qwen_hybrid.QWEN3_NEXT_MTP,
        kinds=HYBRID,
    ),
    Family(
        "qwen3_5",
        (
            "Qwen3_5ForCausalLM",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
        ),
        qwen_hybrid.read_qwen3_5,
        qwen_hybrid.load_qwen_hybrid,
        mtp=qwen_hybrid.QWEN3_5_MTP,
        kinds=HYBRID,
    ),
    Family(
        "qwen4_exp",
        ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"),
        qwen4_exp.read_qwen4_exp,
        qwen4_exp.load_qwen4_exp,
        kinds=HYBRID,
    ),
    Family(
        "mistral",
        (
            "MistralForCausalLM",
            "MinistralForCausalLM",
            "Ministral3ForCausalLM",
            "Mistral3ForConditionalGeneration",
        ),
        mistral.read_mistral,
        load_text_transformer,
        kinds=WINDOWED,
    ),
    Family(
        "mixtral",
        ("MixtralForCausalLM",),
        mistral.read_mixtral,
        mistral.load_mixtral,
        kinds=WINDOWED,
    ),
    Family("phi", ("PhiForCausalLM",), phi.read_phi, phi.load_phi),
    Family("phi3", ("Phi3ForCausalLM",), phi.read_phi3, load_transformer, kinds=WINDOWED),
    Family(
        "phimoe",
        ("PhiMoEForCausalLM", "PhimoeForCausalLM"),
        phi.read_phimoe,
        phi.load_phimoe,
        kinds=WINDOWED,
    ),
    Family(
        "ernie4_5",
        ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
        ernie.read_ernie4_5,
        load_transformer,
    ),
    Family("ernie4_5_moe", ("Ernie4_5_MoeForCausalLM",), ernie.read_ernie4_5_moe, load_transformer),
    Family("olmo", ("OlmoForCausalLM",), olmo.read_olmo, olmo.load_olmo),
    Family("olmoe", ("OlmoeForCausalLM",), olmo.read_olmoe, load_transformer),
    Family("flex_olmo", ("FlexOlmoForCausalLM",), olmo.read_flex_olmo, load_transformer),
    Family(
        "olmo2",
        ("Olmo2ForCausalLM", olmo.WITH_WINDOWS),
        olmo.read_olmo2,
        load_transformer,
        kinds=WINDOWED,
    ),
    Family(
        "olmo_hybrid",
        ("OlmoHybridForCausalLM",),
        olmo.read_olmo_hybrid,
        olmo.load_olmo_hybrid,
        kinds=HYBRID,
    ),
    Family(
        "exaone4",
        ("Exaone4ForCausalLM", "Exaone4_5_ForConditionalGeneration"),
        exaone.read_exaone4,
        load_text_transformer,
        kinds=WINDOWED,
    ),
    Family(
        "exaone_moe",
        ("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),
        exaone.read_exaone_moe,
        exaone.load_exaone_moe,
        kinds=WINDOWED,
    ),
    Family(
        "kolibri1",
        ("Kolibri1ForCausalLM",),
        kolibri.read_kolibri1,
        kolibri.load_kolibri1,
        kinds=WINDOWED,
    ),
    Family("cohere", ("CohereForCausalLM",), cohere.read_cohere, cohere.load_cohere),
    Family(
        "cohere2", ("Cohere2ForCausalLM",), cohere.read_cohere2, cohere.load_cohere, kinds=WINDOWED
    ),
    Family(
        "cohere2_moe",
        ("Cohere2MoeForCausalLM",),
        cohere.read_cohere2_moe,
        cohere.load_cohere,
        kinds=WINDOWED,
    ),
    Family("afmoe", ("AfmoeForCausalLM",), arcee.read_afmoe, arcee.load_afmoe, kinds=WINDOWED),
    Family(
        "laguna", ("LagunaForCausalLM",), laguna.read_laguna, laguna.load_laguna, kinds=WINDOWED
    ),
    Family(
        "step3p7",
        ("Step3p7ForConditionalGeneration", "Step3p7FlashForCausalLM", "Step3p5ForCausalLM"),
        step3p7.read_step3p7,
        step3p7.load_step3p7,
        kinds=WINDOWED,
    ),
    Family(
        "mimo_v2_flash",
        ("MiMoV2FlashForCausalLM",),
        mimo.read_mimo_v2_flash,
        load_transformer,
        kinds=WINDOWED,
    ),
    Family(
        "stablelm",
        ("StableLmForCausalLM",),
        transformer_variants.read_stablelm,
        transformer_variants.load_stablelm,
    ),
    Family(
        "starcoder2",
        ("Starcoder2ForCausalLM",),
        transformer_variants.read_starcoder2,
        transformer_variants.load_starcoder2,
        kinds=WINDOWED,
    ),
    Family(
        "apertus",
        ("ApertusForCausalLM",),
        transformer_variants.read_apertus,
        transformer_variants.load_apertus,
    ),
    Family(
        "deepseek_v2", ("DeepseekV2ForCausalLM",), deepseek.read_deepseek_v2, deepseek.load_deepseek
    ),
    Family(
        "deepseek_v3",
        (
            "DeepseekV3ForCausalLM",
            "KimiK25ForConditionalGeneration",
            "Kimi_K25ForConditionalGeneration",
        ),
        deepseek.read_deepseek_v3,
        deepseek.load_deepseek,
        mtp=deepseek.DEEPSEEK_MTP,
    ),
    Family(
        "deepseek_v32",
        ("DeepseekV32ForCausalLM",),
        deepseek.read_deepseek_v32,
        deepseek.load_sparse_deepseek,
    ),
    Family(
        "deepseek_v4",
        ("DeepseekV4ForCausalLM",),
        deepseek_v4.read_deepseek_v4,
        deepseek_v4.load_deepseek_v4,
        kinds=EVERY_KIND,
    ),
    Family(
        "dots3_note",
        ("Dots3NoteForCausalLM", "Dots3NoteForConditionalGeneration"),
        dots3_note.read_dots3_note,
        dots3_note.load_dots3_note,
        kinds=WINDOWED,
    ),
    Family(
        "mistral4",
        ("Mistral4ForCausalLM",),
        mistral4.read_mistral4,
        deepseek.load_deepseek,
        text_type=mistral4.TEXT_TYPE,
    ),
    Family("youtu", ("YoutuForCausalLM",), dense_latent.read_youtu, dense_latent.load_dense_latent),
    Family(
        "minicpm3",
        ("MiniCPM3ForCausalLM",),
        dense_latent.read_minicpm3,
        dense_latent.load_dense_latent,
    ),
    Family(
        "longcat_flash",
        ("LongcatFlashForCausalLM",),
        longcat_flash.read_longcat_flash,
        longcat_flash.load_longcat_flash,
    ),
    Family("glm", ("GlmForCausalLM",), glm.read_glm, load_transformer),
    Family("glm4", ("Glm4ForCausalLM",), glm.read_glm4, glm.load_glm4),
    Family("solar_open", ("SolarOpenForCausalLM",), glm.read_solar_open, load_transformer),
    Family("glm4_moe", ("Glm4MoeForCausalLM",), glm.read_glm4_moe, load_transformer),
    Family("dots1", ("Dots1ForCausalLM",), glm.read_dots1, load_transformer, kinds=WINDOWED),
    Family(
        "glm4_moe_lite", ("Glm4MoeLiteForCausalLM",), glm.read_glm4_moe_lite, deepseek.load_deepseek
    ),
    Family(
        "glm_moe_dsa",
        ("GlmMoeDsaForCausalLM",),
        glm.read_glm_moe_dsa,
        deepseek.load_sparse_deepseek,
    ),
    Family("hy_v4", ("HYV4ForCausalLM",), hy_v4.read_hy_v4, hy_v4.load_hy_v4),
    Family("gemma", ("GemmaForCausalLM",), gemma.read_gemma, gemma.load_gemma1),
    Family("gemma2", ("Gemma2ForCausalLM",), gemma.read_gemma2, gemma.load_gemma, kinds=WINDOWED),
    Family(
        "vaultgemma",
        ("VaultGemmaForCausalLM",),
        gemma.read_vaultgemma,
        gemma.load_vaultgemma,
        kinds=WINDOWED,
    ),
    Family(
        "gemma3",
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        gemma.read_gemma3,
        gemma.load_gemma,
        kinds=WINDOWED,
    ),
    Family(
        "gemma3n",
        ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
        gemma3n.read_gemma3n,
        gemma3n.load_gemma3n,
        kinds=WINDOWED,
    ),
    Family(
        "gemma4",
        (
            "Gemma4ForCausalLM",
            "Gemma4ForConditionalGeneration",
            "Gemma4UnifiedForCausalLM",
            "Gemma4UnifiedForConditionalGeneration",
        ),
        gemma4.read_gemma4,
        gemma4.load_gemma4,
        kinds=WINDOWED,
    ),
    Family(
        "recurrent_gemma",
        ("RecurrentGemmaForCausalLM",),
        recurrent_gemma.read_recurrent_gemma,
        recurrent_gemma.load_recurrent_gemma,
        kinds=WINDOWED_HYBRID,
    ),
    Family(
        "gpt_oss",
        ("GptOssForCausalLM",),
        gpt_oss.read_gpt_oss,
        gpt_oss.load_gpt_oss,
        quantisations=(MXFP4,),
        kinds=WINDOWED,
    ),
    Family(
        "granite3",
        ("GraniteForCausalLM", granite.WITH_EXPERTS, granite.WITH_SHARED),
        granite.read_granite3,
        granite.load_granite3,
    ),
    Family(
        "granite_swa",
        ("GraniteSWAForCausalLM", granite.EXPERTS_IN_WINDOWS),
        granite.read_granite_swa,
        granite.load_granite3,
        kinds=WINDOWED,
    ),
    Family(
        "granite",
        ("GraniteMoeHybridForCausalLM",),
        granite.read_granite,
        granite.load_granite,
        kinds=HYBRID,
    ),
    Family("bamba", ("BambaForCausalLM",), granite.read_bamba, granite.load_bamba, kinds=HYBRID),
    Family(
        "falcon_h1",
        ("FalconH1ForCausalLM",),
        falcon_h1.read_falcon_h1,
        falcon_h1.load_falcon_h1,
        kinds=HYBRID,
    ),
    Family(
        "nemotron_h",
        ("NemotronHForCausalLM",),
        nemotron_h.read_nemotron_h,
        nemotron_h.load_nemotron_h,
        mtp=nemotron_h.NEMOTRON_H_MTP,
        kinds=HYBRID,
    ),
    Family("zamba", ("ZambaForCausalLM",), zamba.read_zamba, zamba.load_zamba, kinds=HYBRID),
    Family("zamba2", ("Zamba2ForCausalLM",), zamba2.read_zamba2, zamba2.load_zamba2, kinds=HYBRID),
    Family(
        "inkling",
        ("InklingForCausalLM", "InklingForConditionalGeneration"),
        inkling.read_inkling,
        inkling.load_inkling,
        kinds=EVERY_KIND,
    ),
    Family("zaya", ("ZayaForCausalLM",), zaya.read_zaya, zaya.load_zaya, kinds=EVERY_KIND),
    Family(
        "mamba", ("MambaForCausalLM",), mamba.read_mamba, mamba.load_mamba1_model, kinds=RECURRENT
    ),
    Family(
        "falcon_mamba",
        ("FalconMambaForCausalLM",),
        mamba.read_falcon_mamba,
        mamba.load_mamba1_model,
        kinds=RECURRENT,
    ),
    Family(
        "mamba2",
        ("Mamba2ForCausalLM",),
        mamba.read_mamba2,
        mamba.load_mamba2_model,
        kinds=RECURRENT,
    ),
    Family("jetmoe", ("JetMoeForCausalLM",), jetmoe.read_jetmoe, jetmoe.load_jetmoe),
    Family("rwkv", ("RwkvForCausalLM",), rwkv.read_rwkv, rwkv.load_rwkv, kinds=RECURRENT),
    Family("xlstm", ("xLSTMForCausalLM",), xlstm.read_xlstm, xlstm.load_xlstm, kinds=RECURRENT),
    Family("jamba", ("JambaForCausalLM",), jamba.read_jamba, jamba.load_jamba, kinds=HYBRID),
    Family("lfm2", ("Lfm2ForCausalLM",), lfm.read_lfm2, lfm.load_lfm2, kinds=HYBRID),
    Family("lfm3", ("Lfm3ForCausalLM",), lfm3.read_lfm3, lfm3.load_lfm3, kinds=EVERY_KIND),
    Family("lfm2_moe", ("Lfm2MoeForCausalLM",), lfm.read_lfm2_moe, lfm.load_lfm2_moe, kinds=HYBRID),
    Family(
        "minimax",
        ("MiniMaxForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"),
        minimax.read_minimax,
        minimax.load_minimax,
        kinds=HYBRID,
    ),
    Family(
        "minimax_m2", ("MiniMaxM2ForCausalLM",), minimax.read_minimax_m2, minimax.load_minimax_m2
    ),
    Family(
        "minimax_m3",
        (
            "MiniMaxM3ForCausalLM",
            "MiniMaxM3VLForCausalLM",
            "MiniMaxM3SparseForConditionalGeneration",
        ),
        minimax_m3.read_minimax_m3,
        minimax_m3.load_minimax_m3,
    ),
    Family(
        "kimi_linear",
        ("KimiLinearForCausalLM",),
        kimi_linear.read_kimi_linear,
        kimi_linear.load_kimi_linear,
        kinds=HYBRID,
    ),
    Family(
        "bailing_hybrid",
        ("BailingHybridForCausalLM", "BailingMoeV3ForCausalLM"),
        ling3.read_bailing_hybrid,
        ling3.load_bailing_hybrid,
        kinds=HYBRID,
    ),
    Family(
        "ling_25",
        ("BailingMoeV2_5ForCausalLM",),
        ling25.read_ling_25,
        ling25.load_ling_25,
        mtp=ling25.LING_25_MTP,
        kinds=HYBRID,
    ),
    Family(
        "native",
        ("FerrymanNativeForCausalLM",),
        native.read_native,
        native.load_native,
        kinds=EVERY_KIND,
    ),
)
