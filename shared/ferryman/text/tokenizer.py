"""The tokenizer of a Hugging Face folder: its vocabulary, special tokens and chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from ferryman.cache.keys import TokenIds, as_token_ids
from ferryman.errors import ConfigError, InvalidRequest
from ferryman.text.chat import ChatTemplate, Message
from ferryman.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from ferryman.text.pieces import PieceTable, piece_table

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back. `eos_token_ids` end a generation unless `ignore_eos` is asked."""

    encoder: Any
    eos_token_ids: frozenset[int]
    chat_template: ChatTemplate | None
    pieces: PieceTable | None

    @classmethod
    def load(cls, folder: Path | str) -> Tokenizer:
        """Reads a model folder; raises ConfigError naming the file that is missing or unusable."""
        folder = Path(folder)
        description = _read_json(folder / "tokenizer.json")
        encoder = _encoder(folder / "tokenizer.json")
        config = _read_json_if_there(folder / "tokenizer_config.json")
        return cls(
            encoder,
            _eos_token_ids(folder, config, encoder),
            _chat_template(folder, config),
            piece_table(description, encoder.get_vocab(with_added_tokens=True)),
        )

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id that stands for something."""
        return max(self.encoder.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> TokenIds:
        """Token ids of `text`, [tokens]. Lone surrogates are no text and are refused."""
        try:
            encoding = self.encoder.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest("the text is not valid Unicode", "prompt") from error
        return as_token_ids(encoding.ids)

    def encode_chat(self, messages: Sequence[Message]) -> TokenIds:
        """Token ids of a conversation; the template writes the special tokens itself."""
        if self.chat_template is None:
            raise InvalidRequest("this model has no chat template", "messages")
        return self.encode(self.chat_template.render(messages), add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The whole text at once, without special tokens."""
        return str(self.encoder.decode([int(i) for i in token_ids], skip_special_tokens=True))

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, special tokens by their name; for showing logprobs."""
        piece = self.pieces[token_id] if self.pieces is not None else b""
        return piece or (self.encoder.id_to_token(token_id) or "").encode()

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """A fresh detokenizer for text that goes on behind `context` (the prompt's last tokens)."""
        if self.pieces is not None:
            return ByteDetokenizer(self.pieces)
        return WindowDetokenizer(self.decode, [int(i) for i in context[-8:]])


def _encoder(path: Path) -> Any:
    try:
        encoder = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a bad file
        raise ConfigError(f"{path} is no tokenizer: {error}") from error
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return value


def _read_json_if_there(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.exists() else {}


def _eos_token_ids(folder: Path, config: Mapping[str, Any], encoder: Any) -> frozenset[int]:
    """All that any of the folder's files calls an end: generation config, config, tokenizer."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json_if_there(folder / name).get("eos_token_id")
        found.update(value if isinstance(value, list) else [value] if value is not None else [])
    token = _token_name(config.get("eos_token"))
    token_id = encoder.token_to_id(token) if token else None
    return frozenset(found if token_id is None else {*found, token_id})


def _token_name(value: object) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _chat_template(folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    path = folder / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.exists() else config.get("chat_template")
    if isinstance(source, list):
        source = next((one["template"] for one in source if one["name"] == "default"), None)
    if not isinstance(source, str):
        return None
    special = {name: _token_name(config.get(name)) for name in _SPECIAL_NAMES}
    return ChatTemplate(source, {name: token for name, token in special.items() if token})
