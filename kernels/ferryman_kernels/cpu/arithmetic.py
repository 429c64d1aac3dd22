"""The names of what decides the bits of the kernels' results: the loops that a processor takes, or
the card, and the revision of their sources.

On one processor a loop gives the same bits for equal numbers. On another one it may not: tiles add
in an order of their own, and LLVM cuts a sum that it may reorder by the width of vectors that it
prefers for the processor at hand. So the class of a processor is the loops and LLVM's name of it.

A card's class is its compute capability and its name: from them follow the matrix instructions that
Triton chooses, and the tables of tiles. A driver only loads what was compiled.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ferryman_kernels.cpu._compiled import numba, serves
from ferryman_kernels.cpu._lanes import HAS_DOTS, compiled_for, has_feature
from ferryman_kernels.cpu._loop_cache import digest_of_sources
from ferryman_kernels.cpu._tiles import has_tiles

TORCH = "torch"
"""The class of a processor whose products are torch's: nobody promises an order of their sums."""

_COMPUTING = ("torch", "numba", "llvmlite", "numpy")
# torch's functions of single numbers are between the kernels of a card.
_COMPUTING_ON_CARDS = ("torch", "triton")
_FUSION = "TRITON_DEFAULT_FP_FUSION"
"""Triton's setting of whether a product and a sum are rounded together where nobody said so."""
# Of all features of a processor these are the ones that its arithmetic is made of.
_ARITHMETIC_FEATURES = ("avx", "amx", "fma")


def has_one_order(dtype: torch.dtype) -> bool:
    """Whether a token's bits in this dtype depend, on this processor, on its own numbers alone: its
    sums are vectors of a loop of ours."""
    return dtype in (torch.float32, torch.bfloat16) and serves() and has_feature("avx512f")


def processor_class(dtype: torch.dtype) -> str:
    """The loops that this processor takes in `dtype`, and LLVM's name of the processor:
    `amx-bf16.sapphirerapids`; TORCH where no loop `has_one_order`."""
    if not has_one_order(dtype):
        return TORCH
    name, _ = compiled_for()
    return f"{_loops(dtype)}.{name}"


def _loops(dtype: torch.dtype) -> str:
    if dtype is not torch.bfloat16:
        return "avx512"
    if has_tiles():
        return "amx-bf16"
    return "avx512-bf16" if HAS_DOTS else "avx512"


@cache
def kernel_revision(*others: Path) -> str:
    """8 hex digits that change with the sources of the kernels, or in a folder of `others`, with a
    package that computes for them, and with the arithmetic features of the processor.

    No person decides about it: a change that kept all bits has another revision too.
    """
    features = compiled_for()[1].split(",") if numba is not None else []
    decisive = sorted(name for name in features if name[1:].startswith(_ARITHMETIC_FEATURES))
    return _revision(others, _COMPUTING, decisive)


def card_class(device: str) -> str:
    """The class of a card such as `cuda:1`: `9.0-nvidia-h200`; empty if it is not here."""
    index = torch.device(device).index or 0
    if index >= torch.cuda.device_count():
        return ""
    major, minor = torch.cuda.get_device_capability(index)
    name = re.sub("[^a-z0-9]+", "-", torch.cuda.get_device_name(index).lower()).strip("-")
    return f"{major}.{minor}-{name}"


@cache
def card_revision(*others: Path) -> str:
    """8 hex digits that change with the sources of the kernels, or in a folder of `others`, and
    with what compiles or computes for them on a card."""
    settings = [f"CUDA {torch.version.cuda}", f"{_FUSION}={os.environ.get(_FUSION, '')}"]
    return _revision(others, _COMPUTING_ON_CARDS, settings)


def _revision(folders: Iterable[Path], packages: Iterable[str], more: Iterable[str]) -> str:
    sources = [digest_of_sources(folder) for folder in (Path(__file__).parents[1], *folders)]
    versions = [f"{package} {_version(package)}" for package in packages]
    return sha256("\n".join([*sources, *versions, *more]).encode()).hexdigest()[:8]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
