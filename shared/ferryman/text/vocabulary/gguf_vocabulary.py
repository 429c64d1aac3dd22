"""The vocabulary in the metadata of a GGUF file, as `tokenizer.json` describes one.

    tokenizer.ggml.model    "gpt2": tokens of bytes with merges, "llama": sentencepiece with scores,
                            "gemma4": pieces of sentencepiece with merges
    tokenizer.ggml.pre      of "gpt2": how a text is divided before tokens are merged

The divisions are in `text_divisions.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ferryman.gguf.model_file import GgufMetadata, read_model
from ferryman.text.vocabulary.byte_ranks import added_token
from ferryman.text.vocabulary.sentencepiece_model import (
    PieceModel,
    PieceType,
    ScoredPiece,
    merged_pieces,
)
from ferryman.text.vocabulary.text_divisions import DIVISIONS, TextDivision

_TOKENS = "tokenizer.ggml.tokens"
_TYPES = "tokenizer.ggml.token_type"
_UNKNOWN = "tokenizer.ggml.unknown_token_id"


def read_gguf_vocabulary(file: Path) -> dict[str, Any]:
    """The description of the vocabulary in a GGUF file. Raises ConfigError, by key, for one that is
    missing, wrong or not understood."""
    metadata = read_model(file).metadata
    kind = metadata.text("tokenizer.ggml.model")
    if kind == "gpt2":
        return _byte_level(metadata)
    if kind == "llama":
        return _sentencepiece(metadata)
    if kind == "gemma4":
        return _merged_pieces(metadata)
    raise metadata.refusal(
        "tokenizer.ggml.model",
        "gpt2, llama or gemma4; no other is read (bert, WordPiece, is of models without text)",
    )


def _byte_level(metadata: GgufMetadata) -> dict[str, Any]:
    division, tokens = _division(metadata), metadata.words(_TOKENS)
    model = {
        "type": "BPE",
        "ignore_merges": division.takes_whole,
        "vocab": _vocab(metadata, tokens),
        "merges": _merges(metadata),
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    plain = {**byte_level, "use_regex": False}
    description = {
        "version": "1.0",
        "added_tokens": _added(metadata, tokens),
        "normalizer": {"type": "NFC"} if division.composes else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*map(_split, division.patterns), plain],
        },
        "post_processor": None,
        "decoder": plain,
        "model": model,
    }
    return _with_ends(metadata, description, tokens, begins=division.begins)


def _division(metadata: GgufMetadata) -> TextDivision:
    name = metadata.text("tokenizer.ggml.pre", "default")
    if name not in DIVISIONS:
        near = difflib.get_close_matches(name, DIVISIONS, 1)
        nearest = f" (the nearest is {near[0]})" if near else ""
        raise metadata.refusal(
            "tokenizer.ggml.pre", f"one of {', '.join(DIVISIONS)}{nearest}, by which texts divide"
        )
    return DIVISIONS[name]


def _split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _vocab(metadata: GgufMetadata, tokens: Sequence[str]) -> dict[str, int]:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise metadata.refusal(_TOKENS, "of tokens that differ")
    return vocab


def _merges(metadata: GgufMetadata) -> list[list[str]]:
    merges = [merge.split(" ") for merge in metadata.words("tokenizer.ggml.merges")]
    if any(len(pair) != 2 for pair in merges):
        raise metadata.refusal("tokenizer.ggml.merges", "pairs of tokens with a space between")
    return merges


def _types(metadata: GgufMetadata, tokens: Sequence[str]) -> list[PieceType]:
    """The type of each token. A file without types has normal ones alone."""
    if not metadata.has(_TYPES):
        return [PieceType.NORMAL] * len(tokens)
    numbers = metadata.wholes(_TYPES)
    if len(numbers) != len(tokens) or not set(numbers) <= set(PieceType):
        raise metadata.refusal(_TYPES, f"{len(tokens)} numbers from 1 to {max(PieceType)}")
    return [PieceType(number) for number in numbers]


def _added(metadata: GgufMetadata, tokens: Sequence[str]) -> list[dict[str, Any]]:
    """Control tokens, and those of users, which are found in a text before it is divided."""
    added = {PieceType.CONTROL: True, PieceType.USER_DEFINED: False}
    return [
        added_token(token, token_id, special=added[kind])
        for token_id, (token, kind) in enumerate(zip(tokens, _types(metadata, tokens), strict=True))
        if kind in added
    ]


def _sentencepiece(metadata: GgufMetadata) -> dict[str, Any]:
    tokens, scores = metadata.words(_TOKENS), metadata.numbers("tokenizer.ggml.scores")
    _vocab(metadata, tokens)
    types = _types(metadata, tokens)
    if len(scores) != len(tokens):
        raise metadata.refusal(
            "tokenizer.ggml.scores", f"a number for each of {len(tokens)} tokens"
        )
    if metadata.has("tokenizer.ggml.precompiled_charsmap"):
        raise metadata.refusal("tokenizer.ggml.precompiled_charsmap", "absent")
    pieces = tuple(map(ScoredPiece, tokens, scores, types))
    adds_prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    unknown = _unknown(metadata, tokens, types)
    model = PieceModel(pieces, unknown, PieceType.BYTE in types, adds_prefix)
    return _with_ends(metadata, model.description(), tokens, begins=True)


def _unknown(metadata: GgufMetadata, tokens: Sequence[str], types: Sequence[PieceType]) -> str:
    """The piece for what has no other: by its type, or by its key, because a converter makes it a
    control token where `tokenizer_config.json` lists it among those; else the first, as llama.cpp
    has it."""
    if PieceType.UNKNOWN in types:
        return tokens[types.index(PieceType.UNKNOWN)]
    if (token_id := metadata.whole(_UNKNOWN, 0)) >= len(tokens):
        raise metadata.refusal(_UNKNOWN, f"less than the {len(tokens)} tokens of the vocabulary")
    return tokens[token_id]


def _merged_pieces(metadata: GgufMetadata) -> dict[str, Any]:
    tokens = metadata.words(_TOKENS)
    if (token_id := metadata.whole(_UNKNOWN)) >= len(tokens):
        raise metadata.refusal(_UNKNOWN, f"less than the {len(tokens)} tokens of the vocabulary")
    unknown = tokens[token_id]
    vocab, merges = _vocab(metadata, tokens), _merges(metadata)
    description = merged_pieces(vocab, merges, _added(metadata, tokens), unknown)
    return _with_ends(metadata, description, tokens, begins=True)


def _with_ends(
    metadata: GgufMetadata, description: dict[str, Any], tokens: Sequence[str], *, begins: bool
) -> dict[str, Any]:
    """The description with the tokens that every text gets at its beginning and end."""
    steps: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special: dict[str, Any] = {}
    for end, default, place in (("bos", begins, 0), ("eos", False, len(steps) + 1)):
        key = f"tokenizer.ggml.{end}_token_id"
        if not metadata.flag(f"tokenizer.ggml.add_{end}_token", default) or not metadata.has(key):
            continue
        token_id = metadata.whole(key)
        if token_id >= len(tokens):
            raise metadata.refusal(key, f"less than the {len(tokens)} tokens of the vocabulary")
        name = tokens[token_id]
        steps.insert(place, {"SpecialToken": {"id": name, "type_id": 0}})
        special[name] = {"id": name, "ids": [token_id], "tokens": [name]}
    if not special:
        return description
    pair = [*steps, {"Sequence": {"id": "B", "type_id": 1}}]
    processor = {"type": "TemplateProcessing", "single": steps, "pair": pair}
    return {**description, "post_processor": {**processor, "special_tokens": special}}
