"""Text to token ids. The name of a control token in a caller's text is encoded as text.

The library's `encode` holds the interpreter's lock (GIL) from start to end and would block every
thread of the process; `encode_batch_fast` releases it. So this module calls nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from ferryman.cache.keys import TokenIds, as_token_ids
from ferryman.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from ferryman.text.pieces import BYTE_CHARACTERS

# Noncharacters: Unicode reserves these 32 code points, and no text uses them. Two mark words inside
# a chat.
_MARKS = tuple(chr(point) for point in range(0xFDD0, 0xFDF0))
# Composition shortens text in UTF-8 to a third at most: three Hangul letters make one syllable.
_COMPOSED = 3
_KEEPING = frozenset({"ByteLevel", "Digits", "Punctuation", "Metaspace"})


class TextEncoder:
    """Encodes with one vocabulary in two ways: control tokens are honoured, or are plain text.

    `max_token_bytes` bounds the bytes of text that one token stands for; None: there is no bound.
    `names` are those of the control tokens, longer ones first.
    """

    def __init__(self, source: str, description: Mapping[str, Any]) -> None:
        self.honouring, self._plain = _loaded(source), _loaded(source)
        self._plain.encode_special_tokens = True
        self.max_token_bytes = max_token_bytes(description)
        special = [token for token in description.get("added_tokens") or () if token["special"]]
        unknown = description["model"].get("unk_token")
        self.names = tuple(sorted((token["content"] for token in special), key=len, reverse=True))
        self._control_ids = np.array(
            [token["id"] for token in special if token["content"] != unknown], dtype="<u4"
        )
        alternatives = "|".join(re.escape(name) for name in self.names)
        self._runs = re.compile(f"(?:{alternatives})+")

    @classmethod
    def of(cls, path: Path, description: Mapping[str, Any]) -> TextEncoder:
        """The encoder of a description like `tokenizer.json`, which was read from `path`. Raises
        ConfigError when it describes no tokenizer."""
        try:
            return cls(json.dumps(description), description)
        except Exception as error:  # the library raises bare Exception for a bad file
            raise ConfigError(f"{path} is no tokenizer: {error}") from error

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        parse_special: bool,
        max_tokens: int | None,
        param: str,
    ) -> TokenIds:
        """Token ids [tokens]. Raises ContextLengthExceeded beyond `max_tokens`, InvalidRequest for
        lone surrogates; both name `param`."""
        self._check_length(text, max_tokens, param)
        encoder = self.honouring if parse_special else self._plain
        (encoding,) = encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        token_ids = _token_ids([encoding], max_tokens, param)
        if parse_special or self._num_control(token_ids) <= self._num_around(add_special_tokens):
            return token_ids
        return self._spelt(text, add_special_tokens=add_special_tokens, param=param)

    def encode_marked(
        self, text: str, marks: tuple[str, str], *, max_tokens: int | None, param: str
    ) -> TokenIds:
        """Token ids of a text in which control tokens are honoured, except between `marks`."""
        self._check_length(text, max_tokens, param)
        pieces = list(_pieces(text, marks))
        honoured = self._batch(
            self.honouring, [piece for piece, is_plain in pieces if not is_plain]
        )
        encoded = [
            _token_ids([next(honoured)], max_tokens, param)
            if not is_plain
            else self.encode(
                piece, add_special_tokens=False, parse_special=False, max_tokens=None, param=param
            )
            for piece, is_plain in pieces
        ]
        token_ids = np.concatenate(encoded) if encoded else np.empty(0, dtype="<u4")
        _check_count(len(token_ids), max_tokens, param)
        return as_token_ids(token_ids)

    def marks_for(self, texts: Sequence[str]) -> tuple[str, str] | None:
        """Two marks that occur in no text; None when no text contains a control token's name."""
        if not any(name in text for text in texts for name in self.names):
            return None
        free = [mark for mark in _MARKS if not any(mark in text for text in texts)]
        if len(free) < 2:
            raise InvalidRequest("the messages hold all noncharacters of Unicode", "messages")
        return free[0], free[1]

    def marked(self, text: str, marks: tuple[str, str]) -> str:
        """The text with marks around the names of control tokens."""
        return self._runs.sub(lambda run: f"{marks[0]}{run[0]}{marks[1]}", text)

    def _check_length(self, text: str, max_tokens: int | None, param: str) -> None:
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest("the text is not valid Unicode", param) from error
        if max_tokens is None or self.max_token_bytes is None:
            return
        if num_bytes > max_tokens * self.max_token_bytes:
            raise _too_long(-(-num_bytes // self.max_token_bytes), max_tokens, param)

    def _num_control(self, token_ids: TokenIds) -> int:
        return int(np.isin(token_ids, self._control_ids).sum())

    def _num_around(self, add_special_tokens: bool) -> int:
        """The number of control tokens that every text gets, such as one at its beginning."""
        return int(self._plain.num_special_tokens_to_add(False)) if add_special_tokens else 0

    def _spelt(self, text: str, *, add_special_tokens: bool, param: str) -> TokenIds:
        """Encodes each name in pieces, if plain encoding too yields the control token."""
        cuts = [0, *(at for run in self._runs.finditer(text) for at in _inside(run, self.names))]
        pieces = [text[begin:end] for begin, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]
        token_ids = _token_ids(list(self._batch(self._plain, pieces)), None, param)
        if self._num_control(token_ids):
            message = "the text has a control token that this vocabulary cannot write as text"
            raise InvalidRequest(message, param)
        if not add_special_tokens:
            return token_ids
        (empty,) = self._plain.encode_batch_fast([""])
        return as_token_ids(np.concatenate([np.array(empty.ids, dtype="<u4"), token_ids]))

    def _batch(self, encoder: Any, texts: list[str]) -> Iterator[Any]:
        return iter(encoder.encode_batch_fast(texts, add_special_tokens=False))


def _loaded(source: str) -> Any:
    encoder = tokenizers.Tokenizer.from_str(source)
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


def _token_ids(encodings: Sequence[Any], max_tokens: int | None, param: str) -> TokenIds:
    # A length costs nothing; a list of all ids is made while the GIL is held.
    _check_count(sum(len(encoding) for encoding in encodings), max_tokens, param)
    return as_token_ids([token_id for encoding in encodings for token_id in encoding.ids])


def _check_count(num_tokens: int, max_tokens: int | None, param: str) -> None:
    if max_tokens is not None and num_tokens > max_tokens:
        raise _too_long(num_tokens, max_tokens, param)


def _too_long(num_tokens: int, max_tokens: int, param: str) -> ContextLengthExceeded:
    """The refusal of a text of at least so many tokens."""
    # Anthropic's clients read the numbers, others know an overflow by the words behind them.
    message = (
        f"prompt is too long: {num_tokens} tokens > {max_tokens} maximum;"
        f" it is longer than the model's context length"
    )
    return ContextLengthExceeded(message, param)


def _inside(run: re.Match[str], names: Sequence[str]) -> Iterator[int]:
    """The places after the first character of each name in a run of names, and after each name."""
    at = run.start()
    while at < run.end():
        name = next(name for name in names if run.string.startswith(name, at))
        yield at + 1
        at += len(name)
        yield at


def _pieces(text: str, marks: tuple[str, str]) -> Iterator[tuple[str, bool]]:
    """The pieces of a marked text, each with True if it is between marks."""
    is_plain = False
    for piece in re.split(f"([{marks[0]}{marks[1]}])", text):
        if piece in marks:
            is_plain = piece == marks[0]
        elif piece:
            yield piece, is_plain


def max_token_bytes(description: Mapping[str, Any]) -> int | None:
    """The most bytes of text that one token can stand for, by a parsed `tokenizer.json`; None if
    there is no bound.

    A text of more bytes than a model's context times this number has too many tokens, and is
    refused before it is tokenized. The bound exists only if no part of the tokenizer drops text:
    the vocabulary can write each byte, and normalizer and pre-tokenizer keep their input.
    """
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
