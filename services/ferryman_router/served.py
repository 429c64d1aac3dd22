"""The model that is served, as the router knows it: its name, its tokenizer, its limits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ferryman.cache.keys import TokenIds
from ferryman.errors import ConfigError, InvalidRequest, UnknownModel
from ferryman.text.tokenizer import Tokenizer
from ferryman.wire.public import ChatPrompt, Prompt, TextPrompt, TokenPrompt


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`max_len` bounds prompt and output together; `vocab` is one more than any token id."""

    model_id: str
    tokenizer: Tokenizer
    family: str
    dtype: str
    vocab: int
    max_len: int
    created_unix_seconds: int

    @classmethod
    def load(cls, folder: Path, model_id: str, created_unix_seconds: int) -> ServedModel:
        """Reads `config.json` and the tokenizer; raises ConfigError for what is missing."""
        path = folder / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            family = str(config.get("architectures", ["unknown"])[0])
            dtype = str(config.get("dtype") or config.get("torch_dtype") or "")
            vocab, max_len = int(config["vocab_size"]), int(config["max_position_embeddings"])
        except FileNotFoundError as error:
            raise ConfigError(f"{path} is missing") from error
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise ConfigError(f"{path} cannot be used: {error!r}") from error
        tokenizer = Tokenizer.load(folder)
        name = model_id or folder.resolve().name
        return cls(name, tokenizer, family, dtype, vocab, max_len, created_unix_seconds)

    def check_name(self, model: str) -> None:
        """An empty name means the one there is."""
        if model not in ("", self.model_id):
            raise UnknownModel(f"model {model[:80]!r} is not served here", "model")

    def token_ids(self, prompt: Prompt) -> TokenIds:
        """Token ids of a prompt, checked against the vocabulary. May take long: run in a thread."""
        match prompt:
            case TextPrompt(text):
                found, field = self.tokenizer.encode(text), "prompt"
            case ChatPrompt(turns):
                messages = [{"role": turn.role, "content": turn.content} for turn in turns]
                found, field = self.tokenizer.encode_chat(messages), "messages"
            case TokenPrompt(token_ids):
                found, field = token_ids, "prompt"
        if len(found) == 0:
            raise InvalidRequest(f"{field} is empty", field)
        if int(found.max()) >= self.vocab:
            message = (
                f"token id {int(found.max())} is out of range: the vocabulary has {self.vocab}"
            )
            raise InvalidRequest(message, field)
        return found

    def stop_token_ids(self, more: Sequence[int], *, ignore_eos: bool) -> frozenset[int]:
        """All ids that end a request: its own and, unless it says otherwise, the model's."""
        for token_id in more:
            if token_id >= self.vocab:
                message = f"token id {token_id} is out of range: the vocabulary has {self.vocab}"
                raise InvalidRequest(message, "stop_token_ids")
        return frozenset(more) | (frozenset() if ignore_eos else self.tokenizer.eos_token_ids)
