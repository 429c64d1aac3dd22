"""The vocabulary of a sentencepiece model, `tokenizer.model`: a message of protocol buffers.

    ModelProto      pieces = 1, trainer_spec = 2, normalizer_spec = 3
    SentencePiece   piece = 1, score = 2, type = 3
    TrainerSpec     model_type = 3, byte_fallback = 35
    NormalizerSpec  precompiled_charsmap = 2, add_dummy_prefix = 3, remove_extra_whitespaces = 4,
                    escape_whitespaces = 5

(Format: google/sentencepiece, sentencepiece_model.proto.) Models for which the description would
tokenize otherwise than sentencepiece does are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ferryman.text.vocabulary.byte_ranks import added_token

SPACE = "▁"
MAX_PIECES = 4_000_000

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class PieceType(IntEnum):
    """`SentencePiece.Type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class ModelType(IntEnum):
    """`TrainerSpec.ModelType`, of those that have a description."""

    UNIGRAM = 1
    BPE = 2


@dataclass(frozen=True, slots=True)
class ScoredPiece:
    """A piece; its id is its place in the model."""

    text: str
    score: float
    type: PieceType


@dataclass(frozen=True, slots=True)
class PieceModel:
    """A sentencepiece model that leaves a text as it is but for spaces. `unknown` is the piece for
    what has no other."""

    pieces: tuple[ScoredPiece, ...]
    unknown: str
    byte_fallback: bool
    adds_prefix: bool

    def description(self) -> dict[str, Any]:
        """The form of `tokenizer.json`."""
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * self.adds_prefix
        steps = [_replaced(SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
        return {
            "version": "1.0",
            "added_tokens": list(self._added()),
            "normalizer": {"type": "Sequence", "normalizers": list(self._normalizers())},
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": {"type": "Sequence", "decoders": steps},
            "model": self._bpe(),
        }

    def _added(self) -> Iterator[dict[str, Any]]:
        for token_id, piece in enumerate(self.pieces):
            if piece.type is PieceType.CONTROL:
                yield added_token(piece.text, token_id, special=True)
            elif piece.type is PieceType.USER_DEFINED:
                yield added_token(piece.text, token_id, special=False, normalized=True)

    def _normalizers(self) -> Iterator[dict[str, Any]]:
        if self.adds_prefix:
            yield {"type": "Prepend", "prepend": SPACE}
        yield _replaced(" ", SPACE)

    def _bpe(self) -> dict[str, Any]:
        return {
            "type": "BPE",
            "unk_token": self.unknown,
            "fuse_unk": True,
            "byte_fallback": self.byte_fallback,
            "vocab": {piece.text: token_id for token_id, piece in enumerate(self.pieces)},
            "merges": [list(pair) for pair in self._merges()],
        }

    def _merges(self) -> Iterator[tuple[str, str]]:
        """Every division of a piece into two, by the score of the whole, the best first."""
        places = {
            piece.text: token_id
            for token_id, piece in enumerate(self.pieces)
            if piece.type is PieceType.NORMAL
        }
        for whole in sorted(places, key=lambda text: -self.pieces[places[text]].score):
            divisions = (
                (whole[:at], whole[at:])
                for at in range(1, len(whole))
                if whole[:at] in places and whole[at:] in places
            )
            yield from sorted(divisions, key=lambda pair: [places[part] for part in pair])


def merged_pieces(
    vocab: dict[str, int],
    merges: Sequence[Sequence[str]],
    added: Sequence[dict[str, Any]],
    unknown: str | None,
) -> dict[str, Any]:
    """The form of `tokenizer.json` of Gemma's pieces, which are merged by a list and not by scores.

    `added` are its `added_tokens`, `unknown` is the piece for what has no other.
    """
    model = {
        "type": "BPE",
        "unk_token": unknown,
        "fuse_unk": True,
        "byte_fallback": True,
        "vocab": vocab,
        "merges": list(merges),
    }
    return {
        "version": "1.0",
        "added_tokens": list(added),
        "normalizer": _replaced(" ", SPACE),
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [_replaced(SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}],
        },
        "model": model,
    }


def read_sentencepiece(content: bytes) -> PieceModel:
    """Raises ValueError for what is no model, or one that cannot be described exactly."""
    pieces: list[ScoredPiece] = []
    trainer: Mapping[int, Any] = {}
    normalizer: Mapping[int, Any] = {}
    for number, value in _fields(content):
        if number == 1:
            pieces.append(_piece(value))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    unknown = (piece.text for piece in pieces if piece.type is PieceType.UNKNOWN)
    model = PieceModel(
        tuple(pieces),
        next(unknown, ""),
        bool(trainer.get(35, False)),
        adds_prefix=bool(normalizer.get(3, True)),
    )
    if normalizer.get(2) or normalizer.get(4, True):
        raise ValueError("it normalises texts; only the rule identity, with all spaces, is exact")
    if not normalizer.get(5, True) or trainer.get(24, False):
        raise ValueError("it writes spaces otherwise than as ▁ before a word")
    _check(model)
    if ModelType(trainer.get(3, ModelType.UNIGRAM)) is ModelType.UNIGRAM:
        # Described as one, it would take "<unk>" and "<0x41>" in a text for the pieces so named.
        raise ValueError("it is a unigram model; only BPE is exact (a tokenizer.json is read)")
    return model


def _check(model: PieceModel) -> None:
    types = [piece.type for piece in model.pieces]
    if not 0 < len(types) <= MAX_PIECES or PieceType.UNKNOWN not in types:
        raise ValueError("it has no pieces, too many, or none for what is unknown")
    if PieceType.UNUSED in types:
        raise ValueError("it has unused pieces")
    if PieceType.USER_DEFINED in types and model.adds_prefix:
        raise ValueError("it has user-defined pieces and a space before each text")
    if len({piece.text for piece in model.pieces}) < len(types):
        raise ValueError("it has a piece twice")


def _piece(content: bytes) -> ScoredPiece:
    fields = dict(_fields(content))
    if len(number := fields.get(2, bytes(4))) != 4:
        raise ValueError("it has a score that is no number of four bytes")
    (score,) = struct.unpack("<f", number)
    return ScoredPiece(bytes(fields[1]).decode(), score, PieceType(fields.get(3, PieceType.NORMAL)))


def _replaced(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def _fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a message: integers, or bytes, which may be a message again."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == _VARINT:
            value, at = _varint(content, at)
            yield number, value
            continue
        if wire_type == _BYTES:
            length, at = _varint(content, at)
        elif wire_type in (_FIXED32, _FIXED64):
            length = 4 if wire_type == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire_type} is not of protocol buffers")
        if at + length > len(content):
            raise ValueError("it ends within a field")
        yield number, content[at : at + length]
        at += length


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while shift < 70:
        if at >= len(content):
            raise ValueError("it ends within a number")
        byte = content[at]
        at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("a number has more than 64 bits")
