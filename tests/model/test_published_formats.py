"""Published formats are read, and every field of them counts or is known not to.

A file in `published_formats` has the `quantization_config` of a model's config.json, or the whole
of its hf_quant_config.json, and where it stands. The rest of the config is that of `base`, a
published model of the same family. Layers that a tool left out need no list: a layer's tensors say
whether it is in codes, so `ignore` and its like are not read (`test_quantised.py` loads such
mixtures). Neither are scales for keys and values: these stay in the model's dtype.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tools.model_tables import published_configs

from ferryman.errors import ConfigError
from ferryman.model.config import load_format
from ferryman.model.weights.named_weights import WeightFormat
from ferryman.model.weights.quantisation.bitsandbytes import BitsAndBytes
from ferryman.model.weights.quantisation.compressed_tensors import CompressedTensors, Scheme
from ferryman.model.weights.quantisation.fp8 import ScaleBlock
from ferryman.model.weights.quantisation.modelopt import Modelopt

NVFP4, FP8 = Modelopt(("NVFP4",)), Modelopt(("FP8",))
EXPECTED: Mapping[str, WeightFormat] = {
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": NVFP4,
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4": NVFP4,
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8": FP8,
    "nvidia/Llama-3.1-70B-Instruct-FP8": FP8,
    "nvidia/Qwen3-235B-A22B-NVFP4": NVFP4,
    "Qwen/Qwen3-32B-FP8-Static-PerTensor": FP8,
    "nvidia/Qwen3.5-122B-A10B-NVFP4": NVFP4,
    "nvidia/Qwen3.6-35B-A3B-NVFP4": Modelopt(("FP8", "W4A16_NVFP4")),
    "nvidia/Kimi-K2.6-NVFP4": NVFP4,
    "nvidia/MiniMax-M2.5-NVFP4": NVFP4,
    "nvidia/GLM-5.1-NVFP4": NVFP4,
    "nvidia/Gemma-4-26B-A4B-NVFP4": NVFP4,
    "moonshotai/Kimi-K3": CompressedTensors(
        (Scheme(("Linear",), "mxfp4-pack-quantized", 4, ScaleBlock(1, 32)),)
    ),
    "RedHatAI/DeepSeek-V4-Flash-NVFP4-FP8": CompressedTensors(
        (
            Scheme(
                ("re:.*attn.*(fused_wqa_wkv|wq_b|wo_a|wo_b)$",),
                "float-quantized",
                8,
                ScaleBlock(128, 128),
            ),
            Scheme(
                ("re:.*ffn.*(gate|up|down)_proj$",), "nvfp4-pack-quantized", 4, ScaleBlock(1, 16)
            ),
        )
    ),
    "unsloth/llama-3-8b-bnb-4bit": BitsAndBytes(4),
    "google/gemma-2-9b-it in 8 bits": BitsAndBytes(8),
}
"""The formats, with the algorithms of layers or the groups of targets in them."""
REFUSED: Mapping[str, str] = {
    "nvidia/DeepSeek-V4-Flash-NVFP4": "'quant_algo' must be absent for quant_method fp8; it is",
}
"""Formats that are not read, with words of the reason."""

LEFT_OUT = frozenset("exclude_modules ignore llm_int8_skip_modules".split())
KEYS_AND_VALUES = frozenset("kv_cache_quant_algo kv_cache_scheme".split())
SAID_BY_TENSORS = frozenset("bnb_4bit_use_double_quant config_groups group_size".split())
OF_OTHER_NUMBERS = frozenset(
    """
    bnb_4bit_compute_dtype llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight
    llm_int8_threshold
    """.split()
)
OF_TOOLS = frozenset("global_compression_ratio producer quantization_status version".split())
DOUBLED = frozenset(
    """
    _load_in_4bit _load_in_8bit bnb_4bit_quant_storage bnb_4bit_quant_type format load_in_4bit
    """.split()
)
"""Fields that are read where another one does not say the same."""
NONSENSE = ["nonsense"]


@dataclass(frozen=True, slots=True)
class PublishedFormat:
    """The fields of a format in the file of its model; `config` is the rest of config.json."""

    model: str
    file: str
    fields: dict[str, Any]
    config: dict[str, Any]

    def write(self, folder: Path) -> Path:
        in_config = self.file == "config.json"
        config = {**self.config, **({"quantization_config": self.fields} if in_config else {})}
        (folder / "config.json").write_text(json.dumps(config))
        if not in_config:
            (folder / self.file).write_text(json.dumps(self.fields))
        return folder


def _published_formats() -> list[PublishedFormat]:
    configs = {published.model: published.config for published in published_configs()}
    files = sorted((Path(__file__).parent / "published_formats").glob("*.json"))
    return [_published(json.loads(path.read_text()), configs) for path in files]


def _published(facts: dict[str, Any], configs: Mapping[str, dict[str, Any]]) -> PublishedFormat:
    config = {k: v for k, v in configs[facts["base"]].items() if k != "quantization_config"}
    text = config.get("text_config")
    if text is not None:
        config["text_config"] = {k: v for k, v in text.items() if k != "quantization_config"}
    return PublishedFormat(facts["model"], facts["file"], facts["fields"], config)


FORMATS = {published.model: published for published in _published_formats()}


def test_every_format_has_its_expectation() -> None:
    assert FORMATS.keys() == EXPECTED.keys() | REFUSED.keys()


@pytest.mark.parametrize("model", EXPECTED)
def test_a_published_format_is_read(model: str, tmp_path: Path) -> None:
    published = FORMATS[model]
    assert load_format(published.write(tmp_path)) == EXPECTED[model]
    under = published.fields.get("quantization", published.fields)
    ignored = {name for name in under if _with(published, name, tmp_path) == EXPECTED[model]}
    assert ignored <= (
        LEFT_OUT | KEYS_AND_VALUES | SAID_BY_TENSORS | OF_OTHER_NUMBERS | OF_TOOLS | DOUBLED
    )


def _with(published: PublishedFormat, name: str, folder: Path) -> WeightFormat | None:
    """The format with nonsense in the place of a field, or None if it is refused."""
    fields = published.fields
    if "quantization" in fields:
        changed = {**fields, "quantization": {**fields["quantization"], name: NONSENSE}}
    else:
        changed = {**fields, name: NONSENSE}
    try:
        return load_format(replace(published, fields=changed).write(folder))
    except ConfigError:
        return None


@pytest.mark.parametrize("model", REFUSED)
def test_a_published_format_that_is_not_read_is_refused_by_its_field(
    model: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=REFUSED[model]):
        load_format(FORMATS[model].write(tmp_path))
