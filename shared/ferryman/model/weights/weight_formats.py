"""The format of a model's weights, by `quantization_config` of its folder and `--quantize`.

`--quantize int8` is for a model that is stored in floats:

    scale[i]   = max |w[i, :]| / 127              one for each output
    code[i, j] = w[i, j] / scale[i], rounded to the nearest, halves to even

Weights of linear layers alone: embeddings, the head, norms, convolutions and routers stay in the
model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.model.shapes.config_fields import ConfigFields, read_fields
from ferryman.model.weights.matrix import Matrix
from ferryman.model.weights.named_weights import FLOATS, WeightFormat, accumulation_dtype
from ferryman.model.weights.quantisation.awq import read_awq
from ferryman.model.weights.quantisation.bitsandbytes import read_bitsandbytes
from ferryman.model.weights.quantisation.codes import ByteCodes
from ferryman.model.weights.quantisation.compressed_tensors import read_compressed_tensors
from ferryman.model.weights.quantisation.fp8 import read_fbgemm, read_fp8
from ferryman.model.weights.quantisation.gptq import read_gptq
from ferryman.model.weights.quantisation.modelopt import read_modelopt
from ferryman.model.weights.quantisation.mxfp4 import METHOD as MXFP4
from ferryman.model.weights.quantisation.mxfp4 import read_mxfp4
from ferryman.model.weights.quantisation.quantised_matrix import QuantisedMatrix, even_groups

INT8 = "int8"
LARGEST = 127


@dataclass(frozen=True, slots=True)
class Int8AtLoad(WeightFormat):
    """Every weight of a linear layer becomes int8 when it is loaded."""

    def of_floats(self, weight: Tensor, dtype: torch.dtype, device: torch.device) -> Matrix:
        wide = weight.to(accumulation_dtype(dtype))
        largest = wide.abs().amax(dim=1, keepdim=True)
        # A row of zeros has any scale.
        scales = torch.where(largest > 0, largest, torch.ones_like(largest)) / LARGEST
        codes = (wide / scales).round_().to(torch.int8)
        groups = even_groups(weight.shape[1], weight.shape[1])
        return QuantisedMatrix(ByteCodes(codes), scales, groups, None, dtype, device)


FIELD = "quantization_config"
QUANT_FILE = "hf_quant_config.json"
"""The file in which older releases of modelopt say what newer ones say in config.json."""

AS_STORED = "none"
"""The value of `quantize` that changes no weight."""

MODELOPT, BITSANDBYTES = "modelopt", "bitsandbytes"

_READERS: Mapping[str, Callable[[ConfigFields], WeightFormat]] = {
    "fp8": read_fp8,
    "fbgemm_fp8": read_fbgemm,
    "compressed-tensors": read_compressed_tensors,
    "gptq": read_gptq,
    "awq": read_awq,
    MODELOPT: read_modelopt,
    BITSANDBYTES: read_bitsandbytes,
    MXFP4: read_mxfp4,
}
"""The readers of a format's fields, by `quant_method`."""

LINEAR_METHODS = tuple(method for method in _READERS if method != MXFP4)
"""The methods that quantise linear layers one by one, and so do for every family but gpt-oss."""


def read_format(
    fields: ConfigFields, methods: tuple[str, ...], quantize: str = AS_STORED
) -> WeightFormat:
    """The format of the weights, by config.json's `fields`, of a family that knows `methods`.

    Raises ConfigError, by name, for a format that is not known: its tensors may have the names and
    shapes of plain ones. `quantize` is AS_STORED or INT8.
    """
    if quantize not in (AS_STORED, INT8):
        raise ConfigError(f"quantize={quantize!r} is not supported; choose {INT8}, or leave it out")
    stored = _quantisation(fields)
    if stored is None:
        return Int8AtLoad() if quantize == INT8 else FLOATS
    method = _method(stored)
    if method not in methods:
        raise fields.refusal(FIELD, f"absent, or quant_method {' or '.join(methods)}")
    if quantize == INT8:
        raise ConfigError(
            f"{fields.source}: the weights are quantised already, as {method}; leave out "
            f"quantize={quantize}"
        )
    return _READERS[method](stored)


def _quantisation(fields: ConfigFields) -> ConfigFields | None:
    """The fields of the format: in config.json, in its part for text, or in a file of their own;
    None if the weights are in floats."""
    for place in (fields.raw, fields.raw.get("text_config")):
        config = place.get(FIELD) if isinstance(place, Mapping) else None
        if isinstance(config, dict):
            return ConfigFields(fields.source, config)
        if config is not None:
            raise fields.refusal(FIELD, "an object")
    path = fields.source.with_name(QUANT_FILE)
    if not path.is_file():
        return None
    apart = read_fields(path)
    return ConfigFields(path, {"quant_method": MODELOPT, **apart.raw})


def _method(stored: ConfigFields) -> object:
    """`quant_method`, which the first checkpoints of bitsandbytes and of modelopt leave out."""
    named, producer = stored.raw.get("quant_method"), stored.raw.get("producer")
    if any(stored.raw.get(name) is True for name in ("load_in_4bit", "load_in_8bit")):
        return named or BITSANDBYTES
    is_of_modelopt = isinstance(producer, Mapping) and producer.get("name") == MODELOPT
    return named or (MODELOPT if is_of_modelopt else None)
