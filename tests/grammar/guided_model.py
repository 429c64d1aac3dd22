"""A tiny random model with a tokenizer that writes any text, and texts that it is held to."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.text.folders import write_folder
from tests.tiny_models import VARIANTS, save_random
from transformers import PretrainedConfig

from ferryman.schedule.output_grammar import OutputGrammar

# The tokenizer has 341 tokens: the ids behind them are padding, as models have it.
VOCAB_SIZE = 400
MAX_POSITIONS = 4096


def save_guided_model(
    folder: Path, variant: str = "granite_nope", *, seed: int = 0, vocab_size: int = VOCAB_SIZE
) -> Path:
    """A folder to serve structured outputs from: token 1 is the end."""
    options = VARIANTS[variant].to_dict()
    changed = {"vocab_size": vocab_size, "max_position_embeddings": MAX_POSITIONS}
    config: PretrainedConfig = type(VARIANTS[variant])(**{**options, **changed, "eos_token_id": 1})
    folder.mkdir(parents=True, exist_ok=True)
    save_random(folder, config, seed)
    return write_folder(folder)


@dataclass(frozen=True, slots=True)
class Guide:
    """A grammar and what its outputs are checked by."""

    name: str
    grammar: OutputGrammar
    is_right: Callable[[str], object]


def is_order(text: str) -> bool:
    """Checked field by field, without the library that made it."""
    value = json.loads(text)
    ids = value["lines"]
    return (
        list(value) == ["id", "state", "lines", "paid"]
        and isinstance(value["id"], int)
        and 0 <= value["id"] <= 999
        and value["state"] in ("new", "sent", "back")
        and 1 <= len(ids) <= 3
        and all(list(line) == ["sku", "count"] and len(line["sku"]) <= 6 for line in ids)
        and all(1 <= line["count"] <= 20 for line in ids)
        and (value["paid"] is None or isinstance(value["paid"], bool))
    )


ORDER: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 999},
        "state": {"enum": ["new", "sent", "back"]},
        "lines": {
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "sku": {"type": "string", "maxLength": 6},
                    "count": {"type": "integer", "minimum": 1, "maximum": 20},
                },
                "required": ["sku", "count"],
                "additionalProperties": False,
            },
        },
        "paid": {"type": ["boolean", "null"]},
    },
    "required": ["id", "state", "lines", "paid"],
    "additionalProperties": False,
}
CHOICES = ("the ferry", "the river", 'a "quoted" 日本語 word', "x\n\\")
SUM = """
root ::= term ("+" term){0,3}
term ::= [0-9]{1,3} | "(" root ")"
"""
GUIDES = (
    Guide("schema", OutputGrammar.json_schema(ORDER), is_order),
    Guide(
        "regex",
        OutputGrammar.regex(r"[a-f]{2,5}-(\d\d)?é"),
        re.compile(r"[a-f]{2,5}-(\d\d)?é").fullmatch,
    ),
    Guide("choice", OutputGrammar.choice(CHOICES), CHOICES.__contains__),
    Guide("grammar", OutputGrammar.context_free(SUM), re.compile(r"[0-9+()]+").fullmatch),
)
