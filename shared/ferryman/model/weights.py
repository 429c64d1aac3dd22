"""Weights by name, each checked against the shape the config implies, in the model's dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.model.checkpoint import Checkpoint, StoredTensor, open_checkpoint
from ferryman.model.fp8 import num_blocks, scaled_by_block
from ferryman.model.ranks import ALONE, Group

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

_STORED_DTYPES = ("F64", "F32", "BF16", "F16")
_QUANTISED_DTYPES = ("U8",)
_FP8 = "F8_E4M3"


def torch_dtype(name: str) -> torch.dtype:
    """The dtype a model may run in, by its name in settings."""
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not supported; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scans accumulate and recurrent states are kept."""
    return torch.float64 if dtype is torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a checkpoint under `prefix`, as tensors of one dtype on one device.

    `factors`, by full name, are what tensors are multiplied by when they are read. Tensors come
    whole: a loader that cuts them does so for `group`; one that does not is right as well, because
    every rank sees all of the hidden state.
    """

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    prefix: str = ""
    factors: Mapping[str, float | Tensor] = field(default_factory=dict)
    group: Group = ALONE

    def under(self, name: str) -> Weights:
        """The weights of a part: `under("mamba")` reads `<prefix>mamba.<name>`."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def scaled(self, factors: Mapping[str, float | Tensor]) -> Weights:
        """The same weights, those named multiplied: a family's multipliers cost nothing later.

        A factor is one number, or a tensor that broadcasts against the weight.
        """
        named = {self.prefix + name: factor for name, factor in factors.items()}
        return replace(self, factors={**self.factors, **named})

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The tensor `name` in the model's dtype; refused by name when its shape is another."""
        return self.precise(name, *shape).to(self.dtype)

    def precise(self, name: str, *shape: int) -> Tensor:
        """As `tensor`, but never rounded to less than the accumulation dtype.

        What is stored in 8 bits is multiplied by the scales beside it, `<name>_scale_inv`.
        """
        stored = self._checked(name, shape, (*_STORED_DTYPES, _FP8))
        read = stored.read().to(self.device, accumulation_dtype(self.dtype))
        if stored.dtype == _FP8:
            scales = self.precise(f"{name}_scale_inv", *(num_blocks(length) for length in shape))
            read = scaled_by_block(read, scales)
        factor = torch.as_tensor(self.factors.get(stored.name, 1.0), dtype=torch.float64)
        return read.mul_(factor.to(read))

    def quantised(self, name: str, *shape: int) -> Tensor:
        """The bytes of a quantised tensor: uint8, whatever the model's dtype."""
        return self._checked(name, shape, _QUANTISED_DTYPES).read().to(self.device)

    def first_of(self, *names: str) -> str:
        """The first of `names` that exists: formats renamed some tensors over time."""
        for name in names:
            if self.prefix + name in self.checkpoint.tensors:
                return name
        return names[0]

    def _checked(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> StoredTensor:
        stored = self._stored(name)
        if stored.shape != shape:
            raise ConfigError(
                f"{stored.file}: tensor {stored.name!r} has shape {list(stored.shape)}, "
                f"but config.json implies {list(shape)}"
            )
        if stored.dtype not in dtypes:
            raise ConfigError(
                f"{stored.file}: tensor {stored.name!r} has dtype {stored.dtype}; "
                f"supported are {', '.join(dtypes)}"
            )
        return stored

    def _stored(self, name: str) -> StoredTensor:
        full_name = self.prefix + name
        if full_name not in self.checkpoint.tensors:
            files = sorted({t.file.name for t in self.checkpoint.tensors.values()})
            raise ConfigError(
                f"{self.checkpoint.folder}: tensor {full_name!r} is missing from "
                f"{', '.join(files) or 'the checkpoint'}"
            )
        return self.checkpoint.tensors[full_name]


def open_weights(
    folder: Path | str, dtype: torch.dtype, device: torch.device, group: Group = ALONE
) -> Weights:
    """The weights of the model in `folder`; nothing is read before it is asked for."""
    return Weights(open_checkpoint(folder), dtype, device, group=group)
