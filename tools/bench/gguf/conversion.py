"""From a model folder to a GGUF file, by the family's config as our own loader reads it."""

from __future__ import annotations

from pathlib import Path

from tools.bench.gguf.container import GgufModel, GgufType, write_gguf
from tools.bench.gguf.gpt_oss import convert_gpt_oss
from tools.bench.gguf.granite import convert_bamba, convert_granite, convert_granite_hybrid
from tools.bench.gguf.qwen3_next import convert_qwen3_next
from tools.bench.gguf.source import TensorSource

from ferryman.errors import ConfigError
from ferryman.model.config import load_config
from ferryman.model.families.gpt_oss import GptOssConfig
from ferryman.model.families.granite import BambaConfig, GraniteHybridConfig
from ferryman.model.families.qwen_hybrid import QwenHybridConfig
from ferryman.model.layers.transformer import TransformerConfig
from ferryman.model.shapes.config_fields import read_fields

KINDS = {"float32": GgufType.F32, "bfloat16": GgufType.BF16, "int8": GgufType.Q8_0}
"""llama.cpp's form of the weights, by the name that the bench has for a precision."""


GGUF_FILE = "gguf"
"""The model's file for llama.cpp, beside those that it was made from."""


def convert_folder(folder: Path, dtype: str) -> None:
    """Writes the model in `folder` to GGUF_FILE there, its matrices in the form for `dtype`.

    Raises ConfigError for a model that llama.cpp does not have or that this knows no names for.
    """
    source = TensorSource(folder)
    model = _converted(folder, source)
    source.check_empty()
    write_gguf(folder / GGUF_FILE, model, KINDS[dtype])


def _converted(folder: Path, source: TensorSource) -> GgufModel:
    match load_config(folder):
        case GraniteHybridConfig() as config:
            return convert_granite_hybrid(config, source)
        case BambaConfig() as config:
            return convert_bamba(config, source)
        case QwenHybridConfig() as config:
            return convert_qwen3_next(config, source)
        case GptOssConfig() as config:
            return convert_gpt_oss(config, source)
        case TransformerConfig() as config if "Granite" in _architecture(folder):
            return convert_granite(config, source)
        case _:
            raise ConfigError(f"no conversion to GGUF for {_architecture(folder)}")


def _architecture(folder: Path) -> str:
    return " ".join(read_fields(folder / "config.json").words("architectures"))
