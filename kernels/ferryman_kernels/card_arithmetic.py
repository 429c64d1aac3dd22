"""The names of what decides the bits of the kernels' results on a card.

A card's class is its compute capability and its name: from them follow the matrix instructions that
Triton chooses, and the tables of tiles. Its revision is of the kernels' sources, of what compiles
them, and of torch, whose functions of single numbers are between them. A driver only loads what was
compiled.
"""

from __future__ import annotations

import os
import re
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ferryman_kernels.cpu._loop_cache import digest_of_sources

_COMPUTING = ("torch", "triton")
_FUSION = "TRITON_DEFAULT_FP_FUSION"
"""Triton's setting of whether a product and a sum are rounded together where nobody said so."""


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
    with what compiles or computes for them."""
    sources = [digest_of_sources(folder) for folder in (Path(__file__).parent, *others)]
    packages = [f"{package} {_version(package)}" for package in _COMPUTING]
    settings = [f"CUDA {torch.version.cuda}", f"{_FUSION}={os.environ.get(_FUSION, '')}"]
    return sha256("\n".join([*sources, *packages, *settings]).encode()).hexdigest()[:8]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
