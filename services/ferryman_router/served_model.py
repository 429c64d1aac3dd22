"""The model that is served, as the router knows it: its name, its tokenizer, its limits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ferryman.errors import ConfigError, InvalidRequest, UnknownModel
from ferryman.gguf.documents import has_document, read_document
from ferryman.gguf.model_file import model_name
from ferryman.schedule.request import SamplingParams
from ferryman.settings.declaration import suggestion
from ferryman.text.chat_places import located_chat
from ferryman.text.located_prompt import LocatedPrompt
from ferryman.text.tokenizer import Tokenizer
from ferryman.wire.public import ChatPrompt, ChatTurn, Prompt, TextPrompt, TokenPrompt

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
LONGER = 8  # than the context may a text be that is to be truncated


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`max_len` bounds prompt and output together; `vocab` is one more than any token id.
    `defaults` are the fields of a body that the model's makers recommend. `adapters` has the digest
    of each LoRA adapter by its name for clients."""

    model_id: str
    tokenizer: Tokenizer
    family: str
    dtype: str
    vocab: int
    max_len: int
    created_unix_seconds: int
    defaults: Mapping[str, float] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def load(
        cls,
        folder: Path,
        model_id: str,
        created_unix_seconds: int,
        adapters: Mapping[str, str] | None = None,
    ) -> ServedModel:
        """Reads `config.json` and the tokenizer; raises ConfigError for what is missing, and for an
        adapter with the model's name."""
        path = folder / "config.json"
        try:
            config: Any = read_document(path)
            if config is None:
                config = json.loads(path.read_text(encoding="utf-8"))
            family = str(config.get("architectures", ["unknown"])[0])
            dtype = str(config.get("dtype") or config.get("torch_dtype") or "")
            vocab, max_len = int(config["vocab_size"]), int(config["max_position_embeddings"])
        except FileNotFoundError as error:
            raise ConfigError(f"{path} is missing") from error
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise ConfigError(f"{path} cannot be used: {error!r}") from error
        tokenizer = Tokenizer.load(folder)
        name = model_id or model_name(folder)
        if name in (adapters or {}):
            raise ConfigError(f"lora: {name} is the model's name; give the adapter another one")
        return cls(
            name,
            tokenizer,
            family,
            dtype,
            vocab,
            max_len,
            created_unix_seconds,
            generation_defaults(folder),
            adapters or {},
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names that clients may ask for: the model's, and those of its adapters."""
        return self.model_id, *sorted(self.adapters)

    def name_of(self, adapter: str) -> str:
        """The name that an adapter is served under, by its digest; empty: the model alone."""
        names = {digest: name for name, digest in self.adapters.items()}
        return names.get(adapter, self.model_id)

    def check_name(self, model: str) -> str:
        """The name that is meant; an empty one means the model alone. Raises UnknownModel."""
        if model and model not in self.names:
            near = suggestion(model, self.names)
            raise UnknownModel(f"model {model[:80]!r} is not served here{near}", "model")
        return model or self.model_id

    def with_defaults(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A body with what the model's makers recommend for the fields that it leaves out."""
        return {**self.defaults, **{k: v for k, v in body.items() if v is not None}}

    def tokenized(self, prompt: Prompt, most: int, kept: int = 0) -> LocatedPrompt:
        """Token ids of a prompt, checked against the vocabulary, with the places of a chat. May
        take long: run in a thread.

        So many of the last tokens are `kept`, or all with 0. Raises ContextLengthExceeded for a
        text of more than `most` tokens, or LONGER times as many if it is to be cut.
        """
        encoder, max_tokens = self.tokenizer, most * LONGER if kept else most
        match prompt:
            case TextPrompt(text, parse_special, omit_special):
                field = "prompt"
                ids = encoder.encode(
                    text,
                    add_special_tokens=not omit_special,
                    parse_special=parse_special,
                    max_tokens=max_tokens,
                )
                located = LocatedPrompt(ids)
            case ChatPrompt(turns, parse_special, variables):
                field, chat = "messages", [self._message(turn) for turn in turns]
                read = _object(variables, "variables")
                ids = encoder.encode_chat(
                    chat, variables=read, parse_special=parse_special, max_tokens=max_tokens
                )
                located = located_chat(encoder, prompt, chat, read, ids)
            case TokenPrompt(ids, forks):
                field = "prompt"
                located = prompt if isinstance(prompt, LocatedPrompt) else LocatedPrompt(ids, forks)
        if kept and len(ids) > kept:
            located = LocatedPrompt(ids := ids[-kept:])  # what is left begins elsewhere
        if len(ids) == 0:
            raise InvalidRequest(f"{field} is empty", field)
        if int(ids.max()) >= self.vocab:
            message = f"token id {int(ids.max())} is out of range: the vocabulary has {self.vocab}"
            raise InvalidRequest(message, field)
        return located

    def next_call_number(self, prompt: Prompt) -> int:
        """The number of the next call in a conversation, where the model numbers its calls."""
        ids = self.tokenizer.call_ids
        if ids.fit is None or not isinstance(prompt, ChatPrompt):
            return 0
        return ids.fitted([self._message(turn) for turn in prompt.turns]).next_number

    def _message(self, turn: ChatTurn) -> dict[str, Any]:
        """Only newer templates know the role developer; it is what they called system before."""
        template, role = self.tokenizer.chat_template, turn.role
        if role == "developer" and template is not None and role not in template.source:
            role = "system"
        return {**_object(turn.more, "more"), "role": role, "content": turn.content}

    def with_bad_words(self, params: SamplingParams, words: Sequence[str]) -> SamplingParams:
        """The parameters, checked against the vocabulary, with the token ids of bad words: as they
        are at the beginning of a text, and after a space."""
        params.rules.check_vocabulary(self.vocab)
        if not words:
            return params
        spellings = dict.fromkeys(
            ids for word in words for ids in (self._word(word), self._word(f" {word.lstrip()}"))
        )
        rules = replace(params.rules, bad_words=(*params.rules.bad_words, *filter(None, spellings)))
        rules.check_vocabulary(self.vocab)
        return replace(params, rules=rules)

    def _word(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).tolist())

    def stop_token_ids(self, more: Sequence[int], *, ignore_eos: bool) -> frozenset[int]:
        """All ids that end a request: its own and, unless it ignores them, the model's."""
        for token_id in more:
            if token_id >= self.vocab:
                message = f"token id {token_id} is out of range: the vocabulary has {self.vocab}"
                raise InvalidRequest(message, "stop_token_ids")
        return frozenset(more) | (frozenset() if ignore_eos else self.tokenizer.eos_token_ids)


def generation_defaults(folder: Path) -> dict[str, float]:
    """The sampling that `generation_config.json` asks for; the names are those of a body's fields.
    Raises ConfigError for a file that is none."""
    path = folder / "generation_config.json"
    if not has_document(path):
        return {}
    try:
        config: Any = read_document(path)
        if config is None:
            config = json.loads(path.read_text(encoding="utf-8"))
        defaults = {name: config[name] for name in _DEFAULTS if config.get(name) is not None}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be used: {error!r}") from error
    return defaults


def _object(text: str, param: str) -> dict[str, Any]:
    """An object from its JSON text, or an empty one from an empty text."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not valid JSON: {error}", param) from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be a JSON object", param)
    return value
