"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

    y = W·x + scale · B·(A·x),   scale = lora_alpha / r, with rslora lora_alpha / sqrt(r)

A layer's A is [r, inputs] and its B [outputs, r]. A field that asks for something else is refused
by its name, and so is a tensor of a layer that cannot be adapted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any

import torch
import xxhash

from ferryman.errors import ConfigError
from ferryman.model.shapes.config_fields import read_fields
from ferryman.model.weights.adapted import (
    ActiveSegments,
    AdaptedMatrix,
    AdapterName,
    LowRank,
    ServedAdapters,
)
from ferryman.model.weights.checkpoint import Checkpoint, map_file
from ferryman.model.weights.matrix import Matrix
from ferryman.model.weights.safetensors_header import read_header

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 512
_PREFIX, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
# These fields change no number that is computed here.
_WITHOUT_EFFECT = frozenset(
    "auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config "
    "exclude_modules inference_mode init_lora_weights layers_pattern layers_to_transform "
    "loftq_config lora_dropout lora_ga_config megatron_config megatron_core peft_version "
    "qalora_group_size revision runtime_config target_modules task_type".split()
)
_READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "bias"})
# Experts see a part of a batch's rows; a choice of experts, and Mamba 1's selection, are small.
_NOT_ADAPTED = (".experts.", ".router.", ".gate.", ".x_proj.")


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter's files. `scale` multiplies B·A."""

    named: AdapterName
    folder: Path
    scale: float
    checkpoint: Checkpoint


@dataclass(slots=True)
class LoraWeights:
    """The adapters of a model while it is loaded; the first has the number 1. `used` are the
    tensors that some layer has taken."""

    adapters: tuple[LoraAdapter, ...]
    active: ActiveSegments = field(default_factory=ActiveSegments)
    used: set[tuple[str, str]] = field(default_factory=set)

    def adapted(
        self, matrix: Matrix, module: str, dtype: torch.dtype, device: torch.device
    ) -> Matrix:
        """The weight of the layer `module` with the parts of all adapters that change it."""
        candidates = (
            self._part(number, adapter, module, matrix.shape)
            for number, adapter in enumerate(self.adapters, start=1)
        )
        parts = tuple(part for part in candidates if part is not None)
        return AdaptedMatrix(matrix, parts, self.active, dtype, device)

    def _part(
        self, number: int, adapter: LoraAdapter, module: str, shape: tuple[int, int]
    ) -> LowRank | None:
        names = [f"{_PREFIX}{module}{suffix}" for suffix in (_DOWN, _UP)]
        tensors = adapter.checkpoint.tensors
        if not any(name in tensors for name in names):
            return None
        down, up = (_tensor(adapter, name) for name in names)
        if down.shape[1] != shape[1] or up.shape[0] != shape[0] or down.shape[0] != up.shape[1]:
            raise ConfigError(
                f"{adapter.folder / TENSOR_FILE}: A {list(down.shape)} and B {list(up.shape)} of "
                f"{module} do not fit its weight {list(shape)}; the adapter is of another model"
            )
        self.used.update((adapter.named.name, name) for name in names)
        return LowRank(number, down, up * adapter.scale)

    def served(self) -> ServedAdapters:
        """The adapters of the model that is loaded now. Raises ConfigError for tensors that belong
        to no layer that can be adapted."""
        for adapter in self.adapters:
            left = [
                n for n in adapter.checkpoint.tensors if (adapter.named.name, n) not in self.used
            ]
            if left:
                raise ConfigError(
                    f"{adapter.folder / TENSOR_FILE}: {min(left)!r} is of no linear layer that can "
                    f"be adapted in this model ({len(left)} such tensors); embeddings, heads and "
                    "experts cannot"
                )
            adapter.checkpoint.check_unchanged()
        return ServedAdapters(tuple(adapter.named for adapter in self.adapters), self.active)


def read_adapters(folders: Mapping[str, Path]) -> tuple[LoraAdapter, ...]:
    """The adapters by name, in the order of their names. Raises ConfigError, by file and field."""
    return tuple(_read(name, folders[name]) for name in sorted(folders))


def adapter_names(folders: Mapping[str, Path]) -> tuple[AdapterName, ...]:
    """Names and digests alone, in the order in which a model numbers them."""
    return tuple(adapter.named for adapter in read_adapters(folders))


def _read(name: str, folder: Path) -> LoraAdapter:
    fields = read_fields(folder / CONFIG_FILE)
    scale = _scale(folder, fields.raw)
    mapped = map_file(folder / TENSOR_FILE)
    digest = hashlib.blake2b(repr(scale).encode(), digest_size=16)
    with memoryview(mapped.content) as content:
        stored = read_header(mapped.path, content)
        for tensor in sorted(stored, key=lambda header: header.name):
            with content[tensor.start : tensor.end] as part:
                line = [tensor.name, tensor.dtype, tensor.shape, xxhash.xxh3_128_hexdigest(part)]
            digest.update(json.dumps(line).encode())
    for tensor in stored:
        _check_name(mapped.path, tensor.name)
    named = AdapterName(name, digest.hexdigest())
    by_name = {tensor.name: tensor for tensor in stored}
    return LoraAdapter(named, folder, scale, Checkpoint(folder, by_name, {mapped.path: mapped}))


def _scale(folder: Path, raw: Mapping[str, Any]) -> float:
    path = folder / CONFIG_FILE
    if raw.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: peft_type is {raw.get('peft_type')!r}; only LORA is supported")
    if raw.get("bias", "none") != "none":
        raise ConfigError(f"{path}: bias={raw['bias']!r} is not supported; train with none")
    initial = raw.get("init_lora_weights", True)
    if initial not in (True, False, None, "gaussian", "eva"):
        raise ConfigError(
            f"{path}: init_lora_weights={initial!r} changes the base model's weights, which is not "
            "supported; save it with PEFT's path_initial_model_for_weight_conversion"
        )
    for name, value in raw.items():
        if value and name not in _WITHOUT_EFFECT | _READ:
            raise ConfigError(f"{path}: {name}={value!r} is not supported")
    rank, alpha = raw.get("r"), raw.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        raise ConfigError(f"{path}: r={rank!r} should be a whole number from 1 to {MAX_RANK}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise ConfigError(f"{path}: lora_alpha={alpha!r} should be a number")
    return float(alpha) / (sqrt(rank) if raw.get("use_rslora") else rank)


def _check_name(path: Path, name: str) -> None:
    if not name.startswith(_PREFIX) or not name.endswith((_DOWN, _UP)):
        raise ConfigError(
            f"{path}: tensor {name!r} is not supported; linear layers have "
            f"{_PREFIX}<layer>{_DOWN} and {_UP.removeprefix('.')}"
        )
    if refused := next((part for part in _NOT_ADAPTED if part in name), ""):
        raise ConfigError(f"{path}: tensor {name!r}: layers in {refused!r} cannot be adapted")


def _tensor(adapter: LoraAdapter, name: str) -> torch.Tensor:
    tensors = adapter.checkpoint.tensors
    if name not in tensors:
        raise ConfigError(f"{adapter.folder / TENSOR_FILE}: tensor {name!r} is missing")
    tensor = adapter.checkpoint.view(tensors[name])
    if tensor.ndim != 2 or not tensor.is_floating_point():
        raise ConfigError(f"{adapter.folder / TENSOR_FILE}: {name!r} is no matrix of floats")
    return tensor.to(torch.float64, copy=True)
