"""The model families, one file each: config, how it is read, how it is loaded.

A family is added by its file and its line here; docs/adding-a-family.md is the recipe.
"""

from __future__ import annotations

from typing import Any

from ferryman.model.families import (
    bamba,
    deepseek_v3,
    deepseek_v32,
    falcon_h1,
    gemma3,
    gpt_oss,
    granite,
    llama,
    native,
    nemotron_h,
    qwen3,
    qwen3_5,
    qwen3_next,
)
from ferryman.model.family import Family

FAMILIES: tuple[Family[Any], ...] = (
    granite.FAMILY,
    bamba.FAMILY,
    falcon_h1.FAMILY,
    nemotron_h.FAMILY,
    deepseek_v3.FAMILY,
    deepseek_v32.FAMILY,
    llama.FAMILY,
    qwen3.FAMILY,
    qwen3_next.FAMILY,
    qwen3_5.FAMILY,
    native.FAMILY,
    gpt_oss.FAMILY,
    gemma3.FAMILY,
)
