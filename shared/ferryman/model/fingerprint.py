"""The model's fingerprint: equal fingerprints mean equal models, number for number.

fingerprint = blake2b(config as read ‖ dtype ‖ name, dtype, shape and xxh3_128 of every tensor)
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import xxhash

from ferryman.model.checkpoint import StoredTensor, open_checkpoint
from ferryman.model.config import load_config

FINGERPRINT_BYTES = 16


def model_fingerprint(folder: Path | str, dtype: str) -> str:
    """32 hex digits that name the model in `folder` run in `dtype`. Reads every byte of it once."""
    config = load_config(folder)
    tensors = sorted(open_checkpoint(folder).tensors.values(), key=lambda t: (t.file, t.start))
    lines = sorted(
        line for file, ts in groupby(tensors, lambda t: t.file) for line in _lines(file, ts)
    )
    head = json.dumps([repr(config), dtype])
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
    digest.update("\n".join([head, *lines]).encode())
    return digest.hexdigest()


def _lines(file: Path, tensors: Iterable[StoredTensor]) -> list[str]:
    """One line a tensor: how the bytes are split over files makes no difference."""
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        mapped.madvise(mmap.MADV_SEQUENTIAL)
        with memoryview(mapped) as content:
            return [_line(tensor, content) for tensor in tensors]


def _line(tensor: StoredTensor, content: memoryview) -> str:
    with content[tensor.start : tensor.end] as part:
        digest = xxhash.xxh3_128_hexdigest(part)
    return json.dumps([tensor.name, tensor.dtype, tensor.shape, digest])
