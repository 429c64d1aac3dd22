"""A published model has as many parameters as its loader asks for, and its state the bytes that its
config implies: numbers that others count, which a field that is misread would change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.model_tables import PublishedConfig, published_configs

from ferryman.model.config import family_of, load_config
from ferryman.model.footprint import CheckpointShapes
from ferryman.model.shapes.manifest import state_manifest
from ferryman.model.weights.named_weights import Weights
from ferryman.model.weights.safetensors_header import StoredTensor

PAGE_SIZE = 16
TOLERANCE = 0.05

CARDS: Mapping[str, float] = {
    "CohereLabs/c4ai-command-r-v01": 35,
    "CohereLabs/c4ai-command-r7b-12-2024": 8.03,
    "CohereLabs/command-a-plus-05-2026": 218,
    "MiniMaxAI/MiniMax-M1-80k": 456,
    "MiniMaxAI/MiniMax-M2.5": 229,
    "MiniMaxAI/MiniMax-M2.7": 229,
    "MiniMaxAI/MiniMax-M3": 428,
    "NX-AI/xLSTM-7b": 6.87,
    "Qwen/Qwen1.5-MoE-A2.7B": 14.3,
    "Qwen/Qwen2-7B-Instruct": 7.62,
    "Qwen/Qwen2.5-7B-Instruct": 7.62,
    "Qwen/Qwen3-VL-2B-Instruct": 1.72,
    # 125 and the n-grams' table of 51, without the layer for multi-token prediction.
    "Qwen/Qwen3.8-Flash-Next": 176,
    "RWKV/rwkv-4-169m-pile": 0.169,
    "XiaomiMiMo/MiMo-V2-Flash": 309,
    # Its card leaves out the embedding: 8.3.
    "Zyphra/ZAYA1-8B": 8.84,
    "ai21labs/Jamba-v0.1": 51.6,
    "allenai/FlexOlmo-7x7B-1T": 33,
    "allenai/OLMo-2-1124-13B": 13.7,
    "allenai/OLMoE-1B-7B-0924": 6.92,
    "arcee-ai/Trinity-Mini": 26,
    "arcee-ai/Trinity-Nano-Preview": 6,
    "baidu/ERNIE-4.5-0.3B-PT": 0.36,
    "deepseek-ai/DeepSeek-R1": 671,
    "deepseek-ai/DeepSeek-V2-Lite-Chat": 15.7,
    "deepseek-ai/DeepSeek-V3": 671,
    "deepseek-ai/DeepSeek-V3.2": 671,
    "deepseek-ai/DeepSeek-V4-Flash": 284,
    "deepseek-ai/DeepSeek-V4-Pro": 1600,
    "facebook/cwm": 32,
    "google/gemma-2-2b-it": 2.61,
    "google/gemma-2-2b-jpn-it": 2.61,
    "google/gemma-2b": 2.51,
    "google/recurrentgemma-2b": 2.68,
    "ibm-ai-platform/Bamba-9B-v1": 9.78,
    "ibm-granite/granite-4.0-h-tiny": 6.94,
    "meta-llama/Llama-3.2-1B-Instruct": 1.24,
    "meta-llama/Llama-3.2-3B-Instruct": 3.21,
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": 400,
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": 109,
    "inclusionAI/Ling-2.6-flash": 104,
    "inclusionAI/Ring-2.5-1T": 1000,
    "jetmoe/jetmoe-8b": 8.52,
    "meituan-longcat/LongCat-Flash-Chat": 560,
    "microsoft/Phi-3.5-MoE-instruct": 41.9,
    "microsoft/Phi-3.5-mini-instruct": 3.82,
    "microsoft/Phi-4-mini-instruct": 3.84,
    "microsoft/phi-2": 2.78,
    "mistralai/Ministral-3-3B-Instruct-2512": 3.4,
    "mistralai/Mistral-Nemo-Base-2407": 12.2,
    "mistralai/Mixtral-8x22B-v0.1": 141,
    "mistralai/Mixtral-8x7B-v0.1": 46.7,
    "moonshotai/Kimi-K2-Instruct": 1026,
    "moonshotai/Kimi-K2.5": 1026,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31.6,
    "openai-community/gpt2": 0.124,
    "openai-community/gpt2-medium": 0.355,
    "poolside/Laguna-XS.2": 33,
    "rednote-hilab/dots.llm1.inst": 142,
    "stabilityai/stablelm-2-zephyr-1_6b": 1.64,
    "stabilityai/stablelm-3b-4e1t": 2.8,
    "stepfun-ai/Step-3.7-Flash": 196,
    "tencent/Hunyuan-7B-Instruct": 7.5,
    "tencent/Hunyuan-A13B-Instruct": 80,
    "tencent/Hy4-preview": 770,
    "thinkingmachines/Inkling": 975,
    "togethercomputer/RedPajama-INCITE-Base-3B-v1": 2.78,
    "zai-org/GLM-4.5-Air": 106,
    "zai-org/GLM-4.7-Flash": 30,
}
"""Billions of parameters by the models' cards on the hub, where a name says none or a rounder
number: those of the text model, without a layer that drafts."""

NOT_COMPARED = frozenset(
    """
    Aleph-Alpha/Kolibri-1 RecursiveSI/flint allenai/Olmo-Hybrid-7B arcee-ai/AFM-4.5B
    dots-studio/dots3-note-prev
    google/gemma-3n-E4B-it google/gemma-4-E2B-it google/gemma-4-E4B-it google/vaultgemma-1b
    ibm-granite/granite-swash-2b inclusionAI/Ling-3.0-Flash openai/gpt-oss-120b openai/gpt-oss-20b
    poolside/Laguna-S-2.1 tencent/Hy3-preview thinkingmachines/Inkling-Small
    zai-org/GLM-5 zai-org/GLM-5-FP8 zai-org/GLM-5.1
    zai-org/GLM-5.1-FP8 zai-org/GLM-5.2 zai-org/GLM-5.2-FP8
    """.split()
)
"""No count of their text model is known here, or experts are asked for in codes of four bits."""

_SIZE = re.compile(r"-(\d+(?:\.\d+)?)([BbM])(?![a-z0-9])")


@dataclass(frozen=True, slots=True)
class AskedWeights(Weights):
    """Weights without a file: whatever a loader asks for is there, on the meta device and in the
    shape that it asks for. `asked` has the numbers of each tensor, by name."""

    asked: dict[str, int] = field(default_factory=dict)

    def checked(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> StoredTensor:
        full_name = self._full_name(name)
        self.asked[full_name] = prod(shape)
        dtype = "BF16" if "BF16" in dtypes else dtypes[0]
        return StoredTensor(full_name, self.checkpoint.folder, dtype, shape, 0, 0)

    def header(self, name: str) -> StoredTensor:
        return StoredTensor(name, self.checkpoint.folder, "BF16", (1,), 0, 0)

    def has(self, name: str) -> bool:
        return False


def has_many_tensors(config: Mapping[str, Any]) -> bool:
    """Whether it takes seconds to ask for each expert."""
    text = {**config, **config.get("text_config", {})}
    counts = [text.get(name) for name in ("num_experts", "n_routed_experts", "num_local_experts")]
    experts = max((count for count in counts if isinstance(count, int)), default=0)
    num_layers = text.get("num_hidden_layers") or text.get("num_layers", 0)
    return bool(experts * num_layers > 2000)


COMPARED = [
    pytest.param(
        published,
        id=published.model,
        marks=[pytest.mark.slow] if has_many_tensors(published.config) else [],
    )
    for published in published_configs()
    if published.model not in NOT_COMPARED
]


@pytest.mark.parametrize("published", COMPARED)
def test_a_loader_asks_for_the_parameters_of_its_model(
    published: PublishedConfig, tmp_path: Path
) -> None:
    config = load_config(published.write(tmp_path))
    shapes = CheckpointShapes(tmp_path, {}, {})
    weights = AskedWeights(shapes, torch.bfloat16, torch.device("meta"))
    manifest = state_manifest(config, "bfloat16", PAGE_SIZE, "not read")
    family_of(tmp_path).load(config, manifest, weights)
    billions = sum(weights.asked.values()) / 1e9
    assert billions == pytest.approx(named_billions(published.model), rel=TOLERANCE)


def named_billions(model: str) -> float:
    """Billions of parameters by the model's card, or by its name, as in "Qwen3-8B"."""
    if model in CARDS:
        return CARDS[model]
    size = _SIZE.search(model)
    assert size is not None, f"{model} needs its card's number"
    return float(size[1]) * (1e-3 if size[2] == "M" else 1.0)


STATE: Mapping[str, Mapping[str, int]] = {
    # Keys and values in bfloat16: layers · 2 · kv heads · head dim · 2 bytes a token.
    "meta-llama/Meta-Llama-3.1-8B": {"full": 32 * 2 * 8 * 128 * 2},
    "Qwen/Qwen3-8B": {"full": 36 * 2 * 8 * 128 * 2},
    "openai-community/gpt2": {"full": 12 * 2 * 12 * 64 * 2},
    "google/gemma-3-1b-it": {"full": 4 * 2 * 256 * 2, "window": 22 * 2 * 256 * 2},
    "openai/gpt-oss-20b": {"full": 12 * 2 * 8 * 64 * 2, "window": 12 * 2 * 8 * 64 * 2},
    # One latent and one rotary key a token.
    "deepseek-ai/DeepSeek-V3": {"full": 61 * (512 + 64) * 2},
    # A row a token in windows of all layers. Of blocks of 4 tokens a row, an index row and six sums
    # for each of their channels, in float32; of blocks of 128 a row a page of 16 and three sums.
    "deepseek-ai/DeepSeek-V4-Flash": {
        "full": 21 * (512 + 128) * 2 // 4 + 20 * 512 * 2 // PAGE_SIZE,
        "window": 43 * 512 * 2,
        "recurrent": 21 * 6 * (512 + 128) * 4 + 20 * 3 * 512 * 4,
    },
    # Two attentions a layer.
    "meituan-longcat/LongCat-Flash-Chat": {"full": 2 * 28 * (512 + 64) * 2},
    # Every fourth layer and the first two: a latent and an index key; the others, in windows, a
    # wider latent.
    "dots-studio/dots3-note-prev": {
        "full": 13 * (512 + 64 + 128) * 2,
        "window": 33 * (1024 + 64) * 2,
    },
    # Keys and values in all layers, an index key in all but the first three.
    "MiniMaxAI/MiniMax-M3": {"full": (60 * 2 * 4 * 128 + 57 * 128) * 2},
    # Recurrent layers: channels · (conv width - 1) in bfloat16, and the scan's state in float32.
    "state-spaces/mamba-2.8b-hf": {"recurrent": 64 * 5120 * (3 * 2 + 16 * 4)},
    "ai21labs/Jamba-v0.1": {
        "full": 4 * 2 * 8 * 128 * 2,
        "recurrent": 28 * 8192 * (3 * 2 + 16 * 4),
    },
    "ibm-granite/granite-4.0-h-tiny": {
        "full": 4 * 2 * 4 * 128 * 2,
        "recurrent": 36 * ((3072 + 2 * 128) * 3 * 2 + 3072 * 128 * 4),
    },
    "MiniMaxAI/MiniMax-M1-80k": {
        "full": 10 * 2 * 8 * 128 * 2,
        "recurrent": 70 * 64 * 128 * 128 * 4,
    },
    # One latent and one rotary key a token in every eighth layer.
    "inclusionAI/Ring-2.5-1T": {
        "full": 10 * (512 + 64) * 2,
        "recurrent": 70 * 64 * 128 * 128 * 4,
    },
    # Of q and k the last inputs of two convolutions, and values of the token before.
    "Zyphra/ZAYA1-8B": {"full": 40 * 2 * 2 * 128 * 2, "recurrent": 40 * (2 * 10 + 2) * 128 * 2},
    # The matrix of each head, its norm, and its running maximum, in float32; a layer's sections
    # begin at multiples of 64 bytes, so 32 are left free.
    "NX-AI/xLSTM-7b": {"recurrent": 32 * (8 * (512 * 256 + 256 + 1) * 4 + 32)},
    # The inputs of the token before, twice, in bfloat16, and three numbers of each channel.
    "RWKV/rwkv-4-169m-pile": {"recurrent": 12 * 768 * (2 * 2 + 3 * 4)},
    # Delta nets, and in one layer the last nine inputs of the n-grams' convolution, of four
    # streams, with three bytes of each of the last two ids behind them.
    "Qwen/Qwen3.8-Flash-Next": {
        "full": 12 * (2 * 2 * 256 + 128) * 2,
        "recurrent": 36 * ((2 * 2048 + 6144) * 3 * 2 + 48 * 128 * 128 * 4)
        + 64 * -(-(4 * 2560 + 2 * 3) * 9 * 2 // 64),
    },
    # Of keys and values, and of the outputs of attention and experts: three inputs each.
    "thinkingmachines/Inkling": {
        "full": 11 * 2 * 8 * 128 * 2,
        "window": 55 * 2 * 16 * 128 * 2,
        "recurrent": (11 * 2 * 8 * 128 + 55 * 2 * 16 * 128 + 66 * 2 * 6144) * 3 * 2,
    },
    "google/recurrentgemma-2b": {
        "window": 8 * 2 * 256 * 2,
        "recurrent": 18 * 2560 * (3 * 2 + 4),
    },
}
"""Bytes of a token in pages, and of a slot of recurrent state, by hand."""


@pytest.mark.parametrize("model", STATE)
def test_state_has_the_bytes_that_the_config_implies(model: str, tmp_path: Path) -> None:
    (published,) = (config for config in published_configs() if config.model == model)
    config = load_config(published.write(tmp_path))
    layouts = state_manifest(config, "bfloat16", PAGE_SIZE, "not read").layouts
    tokens = {"full": PAGE_SIZE, "window": PAGE_SIZE, "recurrent": 1}
    expected = {kind: size * tokens[kind] for kind, size in STATE[model].items()}
    assert {layout.kind.value: layout.slot_bytes for layout in layouts} == expected
