"""The model's fingerprint: equal fingerprints mean equal models, number for number.

fingerprint = blake2b(config as read ‖ dtype ‖ format of the weights
                      ‖ name, dtype, shape and xxh3_128 of every tensor)
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import xxhash

from ferryman.model.config import load_config, load_format
from ferryman.model.shapes.model_shapes import ModelConfig
from ferryman.model.weights.checkpoint import Checkpoint, open_checkpoint
from ferryman.model.weights.named_weights import OnRead, WeightFormat, uncounted
from ferryman.model.weights.safetensors_header import StoredTensor
from ferryman.model.weights.weight_formats import AS_STORED

FINGERPRINT_BYTES = 16


def model_fingerprint(folder: Path | str, dtype: str, quantize: str = AS_STORED) -> str:
    """32 hex digits that name the model in `folder` run in `dtype`. Reads every byte of it once."""
    config, weight_format = load_config(folder), load_format(folder, quantize)
    return fingerprint_of(config, open_checkpoint(folder), dtype, weight_format)


def fingerprint_of(
    config: ModelConfig,
    checkpoint: Checkpoint,
    dtype: str,
    weight_format: WeightFormat,
    on_read: OnRead = uncounted,
) -> str:
    """The `model_fingerprint` of a checkpoint that is open."""
    tensors = sorted(checkpoint.tensors.values(), key=lambda tensor: (tensor.file, tensor.start))
    lines = sorted(
        line
        for file, stored in groupby(tensors, lambda tensor: tensor.file)
        for line in _lines(checkpoint.files[file].content, stored, on_read)
    )
    head = json.dumps([repr(config), dtype, repr(weight_format)])
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
    digest.update("\n".join([head, *lines]).encode())
    return digest.hexdigest()


def _lines(content: mmap.mmap, tensors: Iterable[StoredTensor], on_read: OnRead) -> list[str]:
    """One line a tensor, so that the division of the bytes into files makes no difference."""
    # In the order of the bytes the kernel can read ahead; loaders that follow find them in memory.
    content.madvise(mmap.MADV_SEQUENTIAL)
    with memoryview(content) as view:
        lines = [_line(tensor, view, on_read) for tensor in tensors]
    content.madvise(mmap.MADV_NORMAL)
    return lines


def _line(tensor: StoredTensor, content: memoryview, on_read: OnRead) -> str:
    on_read(tensor)
    with content[tensor.start : tensor.end] as part:
        digest = xxhash.xxh3_128_hexdigest(part)
    return json.dumps([tensor.name, tensor.dtype, tensor.shape, digest])
