"""`python -m tools.bench loading`: a checkpoint of many tensors, loaded and read, in turn.

open      the file is mapped, and its header is read and checked
load      open, and every tensor in memory of its own, as the layers of a model are loaded
read      the same bytes by `preadv` into memory of the same sizes, by as many threads
reused    the same bytes into one buffer: this keeps nothing, so no load can be as fast

The file is in the page cache; with `--cold` it is dropped from there before each round, so that
figures are those of the disk.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ferryman.model.layers.decoder import side_by_side
from ferryman.model.weights.checkpoint import SINGLE_FILE, open_checkpoint
from ferryman.model.weights.named_weights import Weights
from ferryman_bench.report import ReportRow, comparison_row, show, target_row
from ferryman_bench.timer import Job, time_in_turn

T = TypeVar("T")

LAYERS = 40
COLUMNS = 256
ITEM_BYTES = 2
REUSED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LoadBenchOptions:
    """The file, and how it is read. `is_cold`: from the disk, not from the page cache."""

    num_bytes: int = 2_000_000_000
    num_tensors: int = 20_000
    threads: int = 2
    repeats: int = 3
    is_cold: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Of each tensor, bfloat16."""
        return max(1, self.num_bytes // self.num_tensors // ITEM_BYTES // COLUMNS), COLUMNS

    @property
    def tensor_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * ITEM_BYTES

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The tensors of each layer, in the order of the file."""
        each = -(-self.num_tensors // LAYERS)
        names = [f"layers.{i // each}.experts.{i % each}.weight" for i in range(self.num_tensors)]
        return tuple(tuple(names[at : at + each]) for at in range(0, len(names), each))


def run_bench_loading(choice: LoadBenchOptions, *, as_json: bool) -> int:
    torch.set_num_threads(choice.threads)
    with tempfile.TemporaryDirectory(prefix="ferryman-bench-") as name:
        folder = Path(name)
        write_checkpoint(folder, choice)
        rows = list(load_rows(folder, choice))
    total = choice.num_tensors * choice.tensor_bytes / 1e9
    where = "disk" if choice.is_cold else "page cache"
    title = f"{choice.num_tensors:,} tensors, {total:.1f} GB, {where}, {choice.threads} threads"
    show(f"bench loading: {title}", rows, as_json=as_json)
    return 0


def write_checkpoint(folder: Path, choice: LoadBenchOptions) -> None:
    """Random bytes under a header that names all tensors."""
    size, names = choice.tensor_bytes, [name for layer in choice.names for name in layer]
    entries = {
        name: {"dtype": "BF16", "shape": choice.shape, "data_offsets": [i * size, (i + 1) * size]}
        for i, name in enumerate(names)
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    random = np.random.default_rng(0)
    with (folder / SINGLE_FILE).open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        for _ in names:
            out.write(random.bytes(size))


def load_rows(folder: Path, choice: LoadBenchOptions) -> Iterator[ReportRow]:
    jobs: dict[str, Job] = {
        "open": lambda: open_checkpoint(folder),
        "ours": lambda: load_all(folder, choice),
        "read": lambda: read_all(folder / SINGLE_FILE, choice, into_own_memory),
        "reused": lambda: read_all(folder / SINGLE_FILE, choice, into_one_buffer),
    }
    if choice.is_cold:
        jobs = {name: _cold(folder / SINGLE_FILE, job) for name, job in jobs.items()}
    found = time_in_turn(jobs, choice.repeats)
    gigabytes = choice.num_tensors * choice.tensor_bytes / 1e9
    opened = found["open"]
    yield target_row("open", "ms", (opened.median * 1e3, opened.least * 1e3), None)
    for peer in ("read", "reused"):
        yield comparison_row("load", "GB/s", gigabytes, peer, found)


def load_all(folder: Path, choice: LoadBenchOptions) -> tuple[list[Tensor], ...]:
    """Every tensor, as loaders of layers ask for them."""
    weights = Weights(open_checkpoint(folder), torch.bfloat16, torch.device("cpu"))
    return side_by_side(
        lambda layer: [weights.tensor(name, *choice.shape) for name in layer], choice.names
    )


def read_all(
    file: Path, choice: LoadBenchOptions, read: Callable[[int, int, int, LoadBenchOptions], T]
) -> tuple[T, ...]:
    """The file's bytes but for the header, in parts as long as a layer."""
    opened = os.open(file, os.O_RDONLY)
    try:
        lengths = [len(layer) * choice.tensor_bytes for layer in choice.names]
        begin = os.fstat(opened).st_size - sum(lengths)
        starts = [begin + sum(lengths[:i]) for i in range(len(lengths))]
        parts = list(zip(starts, lengths, strict=True))
        return side_by_side(lambda part: read(opened, part[0], part[1], choice), parts)
    finally:
        os.close(opened)


def into_own_memory(file: int, start: int, length: int, choice: LoadBenchOptions) -> list[Tensor]:
    """Memory that torch allocates for each tensor, as a load has to."""
    found = []
    for at in range(start, start + length, choice.tensor_bytes):
        tensor = torch.empty(choice.tensor_bytes, dtype=torch.uint8)
        if os.preadv(file, [tensor.numpy().data], at) != choice.tensor_bytes:
            raise AssertionError("the file is as long as its header says")
        found.append(tensor)
    return found


def into_one_buffer(file: int, start: int, length: int, choice: LoadBenchOptions) -> int:
    """The end of what was read."""
    buffer = memoryview(bytearray(REUSED_BYTES))
    at = start
    while at < start + length:
        at += os.preadv(file, [buffer[: start + length - at]], at)
    return at


def _cold(file: Path, job: Job) -> Job:
    """The job after the kernel was told to forget the file; what it has written must be on disk."""

    def run() -> object:
        opened = os.open(file, os.O_RDONLY)
        try:
            os.fsync(opened)
            os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(opened)
        return job()

    return run
