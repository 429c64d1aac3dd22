"""The most bytes of text that one token can stand for, read from `tokenizer.json`.

A text of more bytes than a model's context times this number has too many tokens, and is refused
before it is tokenized. The bound exists only if no part of the tokenizer drops text: the vocabulary
can write each byte, and normalizer and pre-tokenizer keep their input.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferryman.text.pieces import BYTE_CHARACTERS

# Composition shortens text in UTF-8 to a third at most: three Hangul letters make one syllable.
_COMPOSED = 3
_KEEPING = frozenset({"ByteLevel", "Digits", "Punctuation", "Metaspace"})


def max_token_bytes(description: Mapping[str, Any]) -> int | None:
    """The bound for a parsed `tokenizer.json`; None if a token may stand for any amount of text."""
    model, added = description.get("model", {}), description.get("added_tokens") or ()
    shrinks = _normalizer_shrinks(description.get("normalizer"))
    if shrinks is None or not _keeps_all(description.get("pre_tokenizer")):
        return None
    if not _writes_every_byte(description) or any(
        token["lstrip"] or token["rstrip"] for token in added
    ):
        return None
    names = [*model["vocab"], *(token["content"] for token in added)]
    # In UTF-8 a name is at least as long as the text it stands for: a byte may be written as two.
    return shrinks * max(len(name.encode()) for name in names)


def _writes_every_byte(description: Mapping[str, Any]) -> bool:
    """Whether every byte has a token. If not, text is dropped or becomes one unknown token."""
    model: Mapping[str, Any] = description["model"]
    if model["type"] != "BPE":
        return False
    if _uses(description.get("pre_tokenizer"), "ByteLevel"):
        return all(character in model["vocab"] for character in BYTE_CHARACTERS)
    names = (f"<0x{byte:02X}>" for byte in range(256))
    return bool(model.get("byte_fallback")) and all(name in model["vocab"] for name in names)


def _uses(step: Mapping[str, Any] | None, kind: str) -> bool:
    if step is None:
        return False
    return step["type"] == kind or any(
        _uses(inner, kind) for inner in step.get("pretokenizers", ())
    )


def _keeps_all(step: Mapping[str, Any] | None) -> bool:
    """Whether a pre-tokenizer only splits; `Whitespace` and similar ones drop their separators."""
    if step is None or step["type"] in _KEEPING:
        return step is None or bool(step.get("behavior") != "Removed")
    if step["type"] == "Split":
        return bool(step["behavior"] != "Removed")
    return step["type"] == "Sequence" and all(_keeps_all(inner) for inner in step["pretokenizers"])


def _normalizer_shrinks(step: Mapping[str, Any] | None) -> int | None:
    """The factor by which a normalizer may shorten a text; None when there is no bound."""
    match step:
        case None | {"type": "Prepend"}:
            return 1
        case {"type": "NFC" | "NFD"}:
            return _COMPOSED
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return 1 if len(new.encode()) >= len(old.encode()) else None
        case {"type": "Sequence", "normalizers": list(steps)}:
            product = 1
            for inner in steps:
                factor = _normalizer_shrinks(inner)
                if factor is None:
                    return None
                product *= factor
            return product
    return None
