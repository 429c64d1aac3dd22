"""The family that is nearest to a config that none reads, by its fields more than by its name.

nearness = share of the config's fields that are in published configs of the family
           − share of the family's required fields that the config does not have
           + a tenth of the likeness of the names of the architectures
           − a fifth if the family refuses the fields

A text model counts where there is one: its own architecture and "model_type" decide if a family has
them. The published configs are those of tests/model/published, which `tools/model_tables.py` writes
into published.json.
"""

from __future__ import annotations

import difflib
import heapq
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ferryman.errors import ConfigError
from ferryman.model.families import FAMILIES, Family
from ferryman.model.shapes.config_fields import ConfigFields

DOCUMENT = Path(__file__).parent / "families" / "published.json"

NEVER_COUNTS = frozenset(
    """
    _attn_implementation_autoset _name_or_path attention_dropout aux_loss_alpha bos_token_id
    cache_implementation dtype embd_pdrop ep_size full_attn_mod hidden_dropout initializer_range
    interpolate_factor mla_scale_q_lora model_type output_router_logits pad_token_id
    pretraining_tp rescale_prenorm_residual resid_pdrop return_dict router_aux_loss_coef
    router_jitter_noise seq_aux tokenizer_class torch_dtype transformers.js_config
    transformers_version use_bfloat16 use_cache
    """.split()
)
"""Fields about training, precision on disk, code, or tokens that no layer sees."""

_OF_EVERY_CONFIG = frozenset(
    """
    architectures audio_config auto_map chunk_size_feed_forward diversity_penalty
    encoder_no_repeat_ngram_size eos_token_id id2label ignore_index image_placeholder label2id
    length_penalty max_length max_position_embeddings media_placeholder_token_id min_length
    model_max_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    quantization_config repetition_penalty temperature text_config top_k top_p typical_p
    vision_config
    """.split()
)
"""Fields of all configs, some by several names, and of the drawing of tokens, which older versions
of transformers wrote."""

_LEAST_SHARE, _LEAST_LIKENESS = 0.5, 0.65
"""A family is near if it knows half of the fields, or if a name is so much alike."""
_SURE, _OF_NAMES, _OF_REFUSAL = 10.0, 0.1, 0.2
_MOST_READ = 6


@dataclass(frozen=True, slots=True)
class PublishedFamily:
    """A published model of a family, and what its published configs have in them."""

    family: Family[Any]
    model: str
    types: frozenset[str]
    fields: frozenset[str]
    required: frozenset[str]


@dataclass(frozen=True, slots=True)
class NearestFamily:
    """The nearest family; `unknown` fields are in none of its published configs, `missing` ones in
    a model of it always. `text` are the fields of the text model."""

    published: PublishedFamily
    architecture: str
    text: ConfigFields
    unknown: tuple[str, ...]
    missing: tuple[str, ...]


@cache
def published_families() -> tuple[PublishedFamily, ...]:
    """One for each family that somebody publishes models of."""
    document: Mapping[str, Any] = json.loads(DOCUMENT.read_text())
    by_name = {family.name: family for family in FAMILIES}
    return tuple(
        PublishedFamily(
            by_name[name],
            row["model"],
            *(frozenset(row[part]) for part in ("types", "fields", "required")),
        )
        for name, row in document.items()
    )


def stem_and_task(architecture: str) -> tuple[str, str]:
    """`LlamaForCausalLM` is `Llama` and `ForCausalLM`."""
    for task in ("LMHeadModel", "Model"):
        if architecture.endswith(task) and "For" not in architecture:
            return architecture.removesuffix(task), task
    stem, preposition, task = architecture.partition("For")
    return stem, preposition + task


def nearest_family(fields: ConfigFields, architecture: str) -> NearestFamily | None:
    """The family nearest to the model of `architecture`, or None if there is none that is near."""
    text = fields.merged_with("text_config")
    names = {name for name in text.raw if not _is_of_every_config(name, text.raw[name])}
    ranked = [
        (_nearness(published, text, names, architecture), number, published)
        for number, published in enumerate(published_families())
    ]
    # Only the first few are read: a family that is far would not win by it.
    first = heapq.nlargest(_MOST_READ, ranked, key=lambda rank: (rank[0], -rank[1]))
    nearness, _, published = max(
        (
            (near - _OF_REFUSAL * _refuses(row.family, text), number, row)
            for near, number, row in first
        ),
        key=lambda rank: (rank[0], -rank[1]),
    )
    likeness, name = _likest(published.family, architecture)
    is_near = nearness >= _SURE / 2 or likeness >= _LEAST_LIKENESS
    if not is_near and _share(names, published.fields) < _LEAST_SHARE:
        return None
    return NearestFamily(
        published,
        name,
        text,
        unknown=tuple(sorted(names - published.fields)),
        missing=tuple(sorted(published.required - text.raw.keys() - _OF_EVERY_CONFIG)),
    )


def _is_of_every_config(name: str, value: object) -> bool:
    """True for fields that say nothing of a model's layers, and for those that are switched off."""
    is_off = value is None or value is False or value in ("", [], {})
    return is_off or name in NEVER_COUNTS or name in _OF_EVERY_CONFIG


def _nearness(
    published: PublishedFamily, text: ConfigFields, names: set[str], architecture: str
) -> float:
    named = {architecture, *(text.raw.get("architectures") or ())}
    is_same = text.raw.get("model_type") in published.types
    is_sure = bool(named & set(published.family.architectures)) or is_same
    missing = 1.0 - _share(set(published.required), frozenset(text.raw))
    likeness, _ = _likest(published.family, architecture)
    return _SURE * is_sure + _share(names, published.fields) - missing + _OF_NAMES * likeness


def _refuses(family: Family[Any], text: ConfigFields) -> bool:
    try:
        family.read(text)
    except ConfigError:
        return True
    return False


def _share(names: set[str], known: frozenset[str]) -> float:
    return len(names & known) / len(names) if names else 0.0


def _likest(family: Family[Any], architecture: str) -> tuple[float, str]:
    """The likeness to the likest name of an architecture of the family, and that name."""
    stem = stem_and_task(architecture)[0].lower()
    likeness = {
        name: difflib.SequenceMatcher(None, stem, stem_and_task(name)[0].lower()).ratio()
        for name in family.architectures
    }
    name = max(likeness, key=lambda name: likeness[name])
    return likeness[name], name
