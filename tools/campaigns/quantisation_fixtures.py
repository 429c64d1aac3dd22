"""Writes weights as modelopt, compressed-tensors and bitsandbytes store them, for the tests.

    python -m tools.campaigns.quantisation_fixtures tests/model/tool_fixtures

Wants those libraries, which the tests do not: `pip install --no-deps nvidia-modelopt==0.47.0
compressed-tensors==0.20.1 bitsandbytes==0.50.2 omegaconf psutil antlr4-python3-runtime==4.9.3` in
an environment of its own with torch for CPUs. A file has the tensors of one weight, `weight` being
the module's name, and `meaning`: the numbers that the library itself dequantises them to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

ROWS, COLUMNS = 6, 128


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in MAKERS.items():
        torch.manual_seed(len(name))
        tensors = make(torch.randn(ROWS, COLUMNS) * 0.05)
        save_file(
            {n: t.detach().contiguous() for n, t in tensors.items()}, folder / f"{name}.safetensors"
        )
        print(name, {n: (str(t.dtype), tuple(t.shape)) for n, t in tensors.items()})


def modelopt_nvfp4(weight: Tensor) -> Mapping[str, Tensor]:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    made, scales, factor = NVFP4QTensor.quantize(weight, 16)
    meaning = made.dequantize(
        dtype=torch.float32, scale=scales, double_scale=factor, block_sizes={-1: 16}
    )
    stored = {"weight": made._quantized_data, "weight_scale": scales, "weight_scale_2": factor}
    return {**stored, "meaning": meaning}


def modelopt_mxfp4(weight: Tensor) -> Mapping[str, Tensor]:
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    made, scales = MXFP4QTensor.quantize(weight, 32)
    scales = scales.reshape(ROWS, -1)
    meaning = made.dequantize(dtype=torch.float32, scale=scales, block_sizes={-1: 32})
    return {"weight": made._quantized_data, "weight_scale": scales, "meaning": meaning}


def modelopt_mxfp8(weight: Tensor) -> Mapping[str, Tensor]:
    from modelopt.torch.quantization.qtensor import MXFP8QTensor

    made, scales = MXFP8QTensor.quantize(weight)
    meaning = made.dequantize(dtype=torch.float32, scale=scales)
    return {"weight": made._quantized_data, "weight_scale": scales, "meaning": meaning}


def modelopt_int4(weight: Tensor) -> Mapping[str, Tensor]:
    """The tool has no inverse of its packing, so codes and scales are multiplied before it."""
    from modelopt.torch.export.quant_utils import pack_int4_in_uint8

    scales = weight.view(ROWS, -1, 64).abs().amax(2) / 7
    spread = scales.repeat_interleave(64, 1)
    meaning = (weight / spread).round().clamp(-8, 7) * spread
    packed = pack_int4_in_uint8(weight, scales, 64)
    return {"weight": packed, "weight_scale": scales, "meaning": meaning}


def _compressed(compressor: Any, weight: Tensor, arguments: Any, factor: Tensor | None) -> Any:
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    blocks = weight.view(ROWS, -1, arguments.group_size)
    scales, _ = calculate_qparams(blocks.amin(2), blocks.amax(2), arguments, factor)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    state = {"weight": weight, "weight_scale": scales}
    if factor is not None:
        state["weight_global_scale"] = factor
    packed = compressor.compress(state, scheme)
    # Its own way back (`decompress`) is in bfloat16.
    codes = unpack_fp4_from_uint8(packed["weight_packed"], ROWS, COLUMNS, dtype=torch.float32)
    small = compressor._decompress_scale(packed["weight_scale"], torch.float32)
    meaning = dequantize(codes, small, args=arguments, global_scale=factor, dtype=torch.float32)
    return {**packed, "meaning": meaning}


def compressed_nvfp4(weight: Tensor) -> Mapping[str, Tensor]:
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils.helpers import generate_gparam

    arguments = QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16,
        scale_dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    factor = generate_gparam(weight.amin(), weight.amax()).reshape(1)
    return dict(_compressed(NVFP4PackedCompressor, weight, arguments, factor))


def compressed_mxfp4(weight: Tensor) -> Mapping[str, Tensor]:
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs

    arguments = QuantizationArgs(
        num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
    )
    return dict(_compressed(MXFP4PackedCompressor, weight, arguments, None))


def four_bits(weight: Tensor, kind: str, *, is_nested: bool) -> Mapping[str, Tensor]:
    import bitsandbytes.functional as library

    packed, state = library.quantize_4bit(
        weight, blocksize=64, compress_statistics=is_nested, quant_type=kind
    )
    parts = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    return {"weight": packed, **parts, "meaning": library.dequantize_4bit(packed, state)}


def eight_bits(weight: Tensor) -> Mapping[str, Tensor]:
    import bitsandbytes.functional as library

    codes, largest, _ = library.int8_vectorwise_quant(weight.half())
    meaning = library.int8_vectorwise_dequant(codes, largest)
    return {"weight": codes, "SCB": largest, "meaning": meaning.float()}


MAKERS: Mapping[str, Callable[[Tensor], Mapping[str, Tensor]]] = {
    "modelopt_nvfp4": modelopt_nvfp4,
    "modelopt_mxfp4": modelopt_mxfp4,
    "modelopt_mxfp8": modelopt_mxfp8,
    "modelopt_int4": modelopt_int4,
    "compressed_nvfp4": compressed_nvfp4,
    "compressed_mxfp4": compressed_mxfp4,
    "bitsandbytes_nf4": lambda weight: four_bits(weight, "nf4", is_nested=False),
    "bitsandbytes_nf4_nested": lambda weight: four_bits(weight, "nf4", is_nested=True),
    "bitsandbytes_fp4": lambda weight: four_bits(weight, "fp4", is_nested=False),
    "bitsandbytes_int8": eight_bits,
}

if __name__ == "__main__":
    main(Path(sys.argv[1]))
