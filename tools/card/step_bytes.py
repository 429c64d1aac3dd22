"""The bytes that a decode step has to move, and how fast a device copies: its limit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Self

import torch
from tools.card_timer import copy_rate

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.errors import ConfigError
from ferryman.model.config import load_config
from ferryman.model.shapes.manifest import state_manifest
from ferryman.model.weights.safetensors_header import StoredTensor
from ferryman.sizing.worker_size import model_files, stored_dtype

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
EXPERTS = ("block_sparse_moe", "experts")
PAGE_SIZE = 64
COPIED_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class StepBytes:
    """A step reads all `weights` once. Of each request it reads and writes the recurrent state, and
    reads the keys and values of its `window_len` last tokens, or of all."""

    weights: int
    recurrent: int
    full_of_token: float
    window_of_token: float
    window_len: int

    @classmethod
    def of(cls, folder: Path) -> Self:
        """The bytes of the model in `folder`, in the dtype that it is stored in.

        Raises ConfigError for a model with experts: which are read depends on the tokens.
        """
        model = model_files(folder)
        manifest = state_manifest(load_config(folder), stored_dtype(model), PAGE_SIZE, "not read")
        return cls(
            _read_weights(model.tensors.values()),
            _slot_bytes(manifest, Kind.RECURRENT),
            _slot_bytes(manifest, Kind.FULL) / PAGE_SIZE,
            _slot_bytes(manifest, Kind.WINDOW) / PAGE_SIZE,
            manifest.window_len,
        )

    def step(self, batch: int, context: int) -> int:
        """The bytes of a step of `batch` requests, each `context` tokens long."""
        tokens = self.full_of_token * context
        tokens += self.window_of_token * min(context, self.window_len)
        return int(self.weights + batch * (2 * self.recurrent + tokens))


def _read_weights(tensors: Iterable[StoredTensor]) -> int:
    """All but a table of embeddings that is no head as well: of it a step reads a row a token."""
    sizes = {tensor.name: tensor.num_bytes for tensor in tensors}
    if experts := [name for name in sizes if any(word in name for word in EXPERTS)]:
        raise ConfigError(f"{experts[0]}: give a model without experts")
    has_head = any(name.endswith(HEAD) for name in sizes)
    return sum(num_bytes for name, num_bytes in sizes.items() if not (has_head and _is_table(name)))


def _is_table(name: str) -> bool:
    return name.endswith(EMBEDDING)


def _slot_bytes(manifest: StateManifest, kind: Kind) -> int:
    return manifest.layout(kind).slot_bytes if kind in manifest.kinds else 0


def device_copy_rate(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy: by a kernel on a card, by torch else."""
    if device.type == "cuda":
        return copy_rate()
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / min(_copy_seconds(target, source) for _ in range(5))


def _copy_seconds(target: torch.Tensor, source: torch.Tensor) -> float:
    began = perf_counter()
    target.copy_(source)
    return perf_counter() - began
