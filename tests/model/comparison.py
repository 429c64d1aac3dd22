"""A random tiny config of a family, and the difference of its logits from transformers'."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model.differences import difference
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.paged_run import PagedRun
from tests.model.ragged import ragged_logits, random_prompt
from tests.oracle import load_oracle
from tests.tiny_models import save_random
from tests.variants import NATIVE
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from ferryman.cache.manifest import Kind
from ferryman.model.families import FAMILIES as ALL
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model

BY_NAME = {family.name: family for family in ALL}
FAMILIES = sorted(name for name in BY_NAME if name != NATIVE)
"""The names of those that transformers has too."""
OF_EACH_KIND = frozenset(
    {
        "cohere2_moe",
        "deepseek_v32",
        "deepseek_v4",
        "dots3_note",
        "exaone4",
        "falcon_h1",
        "falcon_mamba",
        "gemma3",
        "gemma3n",
    }
    | {
        "gemma4",
        "glm_moe_dsa",
        "gpt2",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "hy_v4",
        "inkling",
        "jetmoe",
        "kimi_linear",
        "lfm2",
        "llama",
        "longcat_flash",
    }
    | {"ling_25", "minimax", "minimax_m3", "nemotron_h", "qwen3_next", "qwen4_exp"}
    | {"recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya", NATIVE}
)
"""Every class of layers is in one of them (`test_families.py`)."""
PAGE_SIZES = (4, 8, 16, 32, 64)
TOLERANCES = {"float32": 2e-4, "float64": 1e-12}
"""Sums in the plain order of their inputs round more than blocks do: 1.02e-4 at worst, where
Gemma 2's caps of scores magnify it; below 1e-4 elsewhere."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison's results: the architecture, its kinds of state, the largest difference by
    dtype.

    `shares` is the share of positions that were compared; in float32 only those with clear choices.
    """

    architecture: str
    kinds: tuple[Kind, ...]
    differences: Mapping[str, float]
    shares: Mapping[str, float]


def swept(families: Iterable[str]) -> list[Any]:
    """The parameters of a test of every family: families of layers that others have are `slow`."""
    return [pytest.param(family, marks=marks_of(family)) for family in families]


def marks_of(family: str) -> list[pytest.MarkDecorator]:
    """The marks of a family in a sweep over all."""
    return [] if family in OF_EACH_KIND else [pytest.mark.slow]


def compare(family: str, seed: int, folder: Path) -> Comparison:
    """Prefill in random chunks, then decode step by step, in ragged batches, against float64."""
    rng = random.Random(f"prompts of {family} {seed}")
    save_random(folder, random_config(family, seed), seed)
    prompts = [random_prompt(rng, rng.randint(*span), VOCAB_SIZE) for span in ((1, 40), (41, 120))]
    oracle = load_oracle(folder, torch.float64)
    answers = [oracle.answer(prompt) for prompt in prompts]
    page_size, differences, shares = rng.choice(PAGE_SIZES), {}, {}
    for dtype in TOLERANCES:
        run = PagedRun(load_model(folder, LoadOptions(dtype, page_size=page_size)), seed)
        found = ragged_logits(run, prompts, rng)
        expected = [answer.shown_to(dtype) for answer in answers]
        shown = [logits[: len(right)] for logits, right in zip(found, expected, strict=True)]
        compared = [pair for pair in zip(shown, expected, strict=True) if len(pair[1])]
        differences[dtype] = max((difference(*pair) for pair in compared), default=0.0)
        shares[dtype] = sum(map(len, expected)) / sum(map(len, prompts))
    kinds = run.model.manifest.kinds
    return Comparison(type(oracle.model).__name__, kinds, differences, shares)


def architecture_of(config: PretrainedConfig) -> str:
    """The name of the class that transformers makes of `config`."""
    name: str = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
    return name


def random_config(family: str, seed: int) -> PretrainedConfig:
    """A config by the generator of the family's name, in the file of its reader's name."""
    module = importlib.import_module(f"tests.model.families.{BY_NAME[family].file}")
    config: PretrainedConfig = getattr(module, family)(random.Random(f"{family} {seed}"))
    return config
