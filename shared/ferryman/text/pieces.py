"""The bytes that each token id adds to the text, read from `tokenizer.json`.

Two decoders put text together byte by byte, so a table per token id is exact and fast:

    ByteLevel      every character of a token stands for one byte (GPT-2's table)
    ByteFallback   `<0xE2>` is one byte, `▁` is a space, everything else is itself

Any other decoder (WordPiece, Metaspace, CTC, none at all) may look at neighbours. It has no table,
and the detokenizer decodes a small window instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class PieceTable:
    """`pieces[token_id]` are the bytes that the token adds; special and unknown ids add none."""

    pieces: tuple[bytes, ...]

    def __getitem__(self, token_id: int) -> bytes:
        return self.pieces[token_id] if 0 <= token_id < len(self.pieces) else b""


@dataclass(frozen=True, slots=True)
class ShownPieces:
    """A table in which some control tokens stand for bytes too."""

    pieces: PieceTable
    shown: Mapping[int, bytes]

    def __getitem__(self, token_id: int) -> bytes:
        return self.shown.get(token_id) or self.pieces[token_id]


def piece_table(description: Mapping[str, Any], vocab: Mapping[str, int]) -> PieceTable | None:
    """The table for a parsed `tokenizer.json`; None when its decoder looks at neighbours."""
    to_bytes = _byte_rule(description.get("decoder"))
    if to_bytes is None:
        return None
    special = {token["id"] for token in description.get("added_tokens", ()) if token["special"]}
    pieces = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        if token_id not in special:
            pieces[token_id] = to_bytes(token)
    return PieceTable(tuple(pieces))


def _byte_rule(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes] | None:
    if decoder is None:
        return None
    if decoder["type"] == "ByteLevel":
        return _byte_level
    if decoder["type"] != "Sequence":
        return None
    steps = [step["type"] for step in decoder["decoders"]]
    if steps == ["ByteLevel"]:
        return _byte_level
    supported = {"Replace", "ByteFallback", "Fuse", "Strip"}
    if "ByteFallback" in steps and set(steps) <= supported and _replaces_only_underline(decoder):
        return _byte_fallback
    return None


def _replaces_only_underline(decoder: Mapping[str, Any]) -> bool:
    replaces = [step for step in decoder["decoders"] if step["type"] == "Replace"]
    return all(
        step["pattern"] == {"String": "▁"} and step["content"] == " " for step in replaces
    ) and bool(replaces)


def _byte_fallback(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()


def _byte_level(token: str) -> bytes:
    """A token with a character outside the table (an added token) stands for its own text."""
    if all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    return token.encode()


def _byte_of_character() -> dict[str, int]:
    """Printable Latin-1 stands for itself; the other 68 bytes follow from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()
BYTE_CHARACTERS = frozenset(_BYTE_OF)  # the characters for the 256 bytes in ByteLevel
CHARACTER_OF_BYTE = {byte: character for character, byte in _BYTE_OF.items()}
