"""The forms in which a model of the table is served: as it is, or with weights in codes, with pages
in codes, or with an adapter. A name is the model's, a colon, the form's: `llama:gptq`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.lora_folders import save_adapter
from tests.mxfp4_folders import save_mxfp4
from tests.quantised_folders import (
    RECIPES,
    Recipe,
    awq,
    awq_config,
    gptq,
    gptq_config,
    save_quantised,
)
from transformers import AutoConfig, GptOssConfig

ADAPTER = "kites"
GROUP_LEN = 32
"""The columns that share a scale in `gptq` and `awq`: as few as torch's product with int4 takes."""
BLOCK_LEN = 32
"""The columns of a block of MXFP4."""

CODED: Mapping[str, Recipe] = {
    "fp8": RECIPES["fp8 by block"],
    "fp8-tensor": RECIPES["fp8 by tensor"],
    "gptq": Recipe(
        gptq_config(4, GROUP_LEN, sym=True, desc_act=False, checkpoint_format="gptq"),
        partial(gptq, bits=4, symmetric=True, in_order=True, group=GROUP_LEN),
        rows=16,
        columns=GROUP_LEN,
    ),
    "gptq-order": RECIPES["gptq int4, zeros and order"],
    "gptq-int8": RECIPES["gptq v2 int8"],
    "awq": Recipe(awq_config(GROUP_LEN), partial(awq, group=GROUP_LEN), rows=16, columns=GROUP_LEN),
    "packed-int4": RECIPES["packed int4"],
    "packed-int8": RECIPES["packed int8"],
    "stored-int8": RECIPES["compressed int8"],
    "int8-zeros": RECIPES["compressed int8, zeros"],
}
"""Formats that linear layers are stored in, one of each product with codes and of each reader."""


@dataclass(frozen=True, slots=True)
class ServedForm:
    """A folder, what an engine's options have besides, and the adapter that requests ask for."""

    folder: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    adapter: str = ""


def as_it_is(plain: Path, _scratch: Path) -> ServedForm:
    return ServedForm(plain)


def in_codes(recipe: Recipe, plain: Path, scratch: Path) -> ServedForm:
    return ServedForm(save_quantised(plain, scratch, recipe))


def in_mxfp4(plain: Path, scratch: Path) -> ServedForm:
    """A model of the same config, whose experts have whole blocks. Raises ValueError for another
    family than gpt-oss."""
    config = AutoConfig.from_pretrained(plain)
    if not isinstance(config, GptOssConfig):
        raise ValueError("MXFP4 is a format of gpt_oss alone")
    config.intermediate_size = -(-config.intermediate_size // BLOCK_LEN) * BLOCK_LEN
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _, folder = save_mxfp4(scratch, config)
    return ServedForm(folder)


def with_coded_pages(plain: Path, _scratch: Path) -> ServedForm:
    return ServedForm(plain, {"kv_dtype": "fp8"})


def with_adapter(plain: Path, scratch: Path) -> ServedForm:
    """Another adapter stands before it, so that its number is not the first."""
    folders = {name: scratch / name for name in ("boats", ADAPTER)}
    for seed, folder in enumerate(folders.values()):
        save_adapter(plain, folder, seed=seed)
    return ServedForm(plain, {"lora": folders}, ADAPTER)


AS_IT_IS = ""
FORMS: Mapping[str, Callable[[Path, Path], ServedForm]] = {
    AS_IT_IS: as_it_is,
    **{name: partial(in_codes, recipe) for name, recipe in CODED.items()},
    "mxfp4": in_mxfp4,
    "fp8-pages": with_coded_pages,
    "adapter": with_adapter,
}
"""By what stands behind the colon: from a plain folder and one that is not there yet."""
