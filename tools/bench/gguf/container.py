"""The GGUF file format: settings by name, then tensors in float32, bfloat16 or Q8_0.

Little-endian, version 3, as in the specification of ggml:

    "GGUF" | version | number of tensors | number of settings | settings | headers | contents

Q8_0 keeps blocks of 32 numbers of a row, each as a float16 step and 32 int8: x ≈ step · q with
step = max |x| / 127.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor

from ferryman.errors import ConfigError

ALIGNMENT = 32
VERSION = 3
BLOCK_LEN = 32

Setting = (
    str | bool | int | float | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]
)
"""A setting's value. Whole numbers are written as uint32, in a sequence as int32, others as
float32."""


class GgufType(Enum):
    """The form of a matrix in the file; the values are ggml's numbers of its types."""

    F32 = 0
    Q8_0 = 8
    BF16 = 30


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor under llama.cpp's name. Only a matrix is rounded: all others stay float32."""

    name: str
    values: Tensor
    is_matrix: bool

    def content(self, kind: GgufType) -> bytes:
        return _encoded(self.values, self.kind_in(kind))

    def kind_in(self, kind: GgufType) -> GgufType:
        """The form of this tensor in a file of `kind`."""
        return kind if self.is_matrix else GgufType.F32


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The content of a file. Settings of the architecture are named without its prefix."""

    architecture: str
    settings: Mapping[str, Setting]
    tensors: tuple[GgufTensor, ...]


def write_gguf(path: Path, model: GgufModel, kind: GgufType) -> None:
    """Writes the file, a tensor at a time.

    Raises ConfigError, by name, for a matrix with rows that Q8_0 cannot cut into blocks.
    """
    head = bytearray(b"GGUF")
    settings = _all_settings(model)
    head += struct.pack("<IQQ", VERSION, len(model.tensors), len(settings))
    for name, value in settings.items():
        head += text_bytes(name) + setting_bytes(value)
    end = 0
    for tensor in model.tensors:
        head += _header(tensor, kind, end)
        end += _padded(_num_bytes(tensor, kind))
    with path.open("wb") as out:
        out.write(head + bytes(_padded(len(head)) - len(head)))
        for tensor in model.tensors:
            content = tensor.content(kind)
            out.write(content)
            out.write(bytes(_padded(len(content)) - len(content)))


def quantise_q8_0(rows: Tensor) -> Tensor:
    """Rows [..., n · 32] as uint8 [..., n, 34]: two bytes of the step, then 32 int8."""
    blocks = rows.to(torch.float32).reshape(*rows.shape[:-1], -1, BLOCK_LEN)
    step = blocks.abs().amax(-1, keepdim=True) / 127
    # ggml multiplies by the reciprocal of the exact step, and stores the step rounded.
    codes = torch.where(step > 0, blocks * (1 / step), 0.0)
    # Halves are rounded away from zero there; torch.round would round them to even.
    codes = torch.trunc(codes + torch.sign(codes) * 0.5).to(torch.int8)
    stored = step.to(torch.float16).view(torch.uint8)
    return torch.cat([stored, codes.view(torch.uint8)], dim=-1)


def _all_settings(model: GgufModel) -> dict[str, Setting]:
    own = {f"{model.architecture}.{name}": value for name, value in model.settings.items()}
    # Token ids alone go in and out, so the file needs no vocabulary.
    return {"general.architecture": model.architecture, "tokenizer.ggml.model": "none", **own}


def _header(tensor: GgufTensor, kind: GgufType, start: int) -> bytes:
    form, shape = tensor.kind_in(kind), tensor.values.shape
    if form is GgufType.Q8_0 and shape[-1] % BLOCK_LEN:
        raise ConfigError(
            f"{tensor.name}: rows of {shape[-1]} numbers; Q8_0 needs a multiple of {BLOCK_LEN}"
        )
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return text_bytes(tensor.name) + sizes + struct.pack("<IQ", form.value, start)


def _num_bytes(tensor: GgufTensor, kind: GgufType) -> int:
    numbers = tensor.values.numel()
    match tensor.kind_in(kind):
        case GgufType.F32:
            return numbers * 4
        case GgufType.BF16:
            return numbers * 2
        case GgufType.Q8_0:
            return numbers // BLOCK_LEN * (2 + BLOCK_LEN)


def _encoded(values: Tensor, form: GgufType) -> bytes:
    match form:
        case GgufType.F32:
            stored = values.to(torch.float32)
        case GgufType.BF16:
            stored = values.to(torch.bfloat16).view(torch.int16)
        case GgufType.Q8_0:
            stored = quantise_q8_0(values)
    return stored.contiguous().numpy().tobytes()


def setting_bytes(value: Setting) -> bytes:
    """The number of a value's type, and the value."""
    match value:
        case str():
            return struct.pack("<I", 8) + text_bytes(value)
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case [str(), *_]:
            texts = b"".join(text_bytes(str(text)) for text in value)
            return struct.pack("<IIQ", 9, 8, len(value)) + texts
    number, code = _ELEMENTS[type(next(iter(value), 0))]
    return struct.pack(f"<IIQ{len(value)}{code}", 9, number, len(value), *value)


_ELEMENTS = {bool: (7, "?"), int: (5, "i"), float: (6, "f")}
"""ggml's number of a type, and struct's letter."""


def text_bytes(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _padded(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT
