"""Gemma 2: Gemma 3 with capped scores, without norms of heads; every other layer has a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ferryman.model.families.gemma3 import GemmaConfig, load_gemma
from ferryman.model.family import Family
from ferryman.model.readers.config_readers import (
    GELU,
    check_activation,
    read_attention,
    read_rotary,
    read_trunk,
)
from ferryman.model.readers.transformer_readers import read_plain_mlp, read_windows
from ferryman.model.shapes.attention_shapes import AttentionShape
from ferryman.model.shapes.config_fields import ConfigFields

DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "hidden_activation": GELU,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
}
"""The meaning of fields that a published config leaves out; null is a value of its own."""


def _read(whole: ConfigFields) -> GemmaConfig:
    fields = ConfigFields(whole.source, {**DEFAULTS, **whole.raw})
    check_activation(fields, "hidden_activation", (GELU,))
    if fields.flag("use_bidirectional_attention", False):
        raise fields.refusal("use_bidirectional_attention", "false")
    return GemmaConfig(
        trunk=read_trunk(fields),
        attention=_read_attention(fields),
        mlp=read_plain_mlp(fields),
        logits_cap=fields.not_negative("final_logit_softcapping", 0.0),
    )


def _read_attention(fields: ConfigFields) -> tuple[AttentionShape, ...]:
    scale = fields.positive("query_pre_attn_scalar") ** -0.5
    plain = read_attention(fields, scale, read_rotary(fields, default_factor=1.0))
    cap = fields.not_negative("attn_logit_softcapping", 0.0)
    return read_windows(fields, replace(plain, score_cap=cap), lambda layer: layer % 2 == 0)


FAMILY = Family(("Gemma2ForCausalLM",), _read, load_gemma)
