"""The vocabulary of a model folder, whichever file it is in, as `tokenizer.json` describes one.

    tokenizer.json                      taken as it is
    tekken.json                         byte strings with ranks (Mistral)
    *.tiktoken, tiktoken.model          byte strings with ranks; the pattern follows from the class
    tokenizer.model                     sentencepiece, or byte strings with ranks (Llama 3)
    *.gguf                              in the metadata of the model's own file

Added tokens of `tokenizer_config.json` come on top of all but the first and the last.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ferryman.errors import ConfigError
from ferryman.gguf.model_file import is_gguf
from ferryman.text.vocabulary.byte_ranks import (
    ByteVocabulary,
    added_token,
    read_tekken,
    read_tiktoken,
)
from ferryman.text.vocabulary.gguf_vocabulary import read_gguf_vocabulary
from ferryman.text.vocabulary.sentencepiece_model import read_sentencepiece

Description = dict[str, Any]

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_THREE_DIGITS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_ONE_DIGIT = _THREE_DIGITS.replace("{1,3}", "")
_UPPER, _LOWER = (
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
)
_HAN_APART = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_REST}"
)
PATTERNS = {
    "QWenTokenizer": _ONE_DIGIT,
    "TikTokenTokenizer": _HAN_APART,
    "Llama3Tokenizer": _THREE_DIGITS,
    "PreTrainedTokenizerFast": _THREE_DIGITS,
}
"""Patterns that divide a text, by `tokenizer_class` (Qwen, Kimi K2, Llama 3): files of ranks have
none."""


def read_vocabulary(folder: Path, config: Mapping[str, Any]) -> tuple[Path, Description]:
    """The file, and its description. `config` is that of `tokenizer_config.json`.

    Raises ConfigError, naming the file, when there is none, or for one that is not understood.
    """
    if is_gguf(folder):
        return folder, read_gguf_vocabulary(folder)
    for pattern, read in _READERS.items():
        for path in sorted(folder.glob(pattern)):
            try:
                return path, read(path.read_bytes(), config)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ConfigError(
                    f"{path} is no vocabulary that can be read: {error}; transformers may write a "
                    "tokenizer.json from it"
                ) from error
    raise ConfigError(f"{folder / 'tokenizer.json'} is missing, and so are {', '.join(_READERS)}")


def _from_json(content: bytes, config: Mapping[str, Any]) -> Description:
    description = json.loads(content)
    if not isinstance(description, dict):
        raise ValueError("it must hold a JSON object")
    return description


def _from_tekken(content: bytes, config: Mapping[str, Any]) -> Description:
    vocabulary = read_tekken(json.loads(content))
    return _beginning(vocabulary.description(), {"bos_token": "<s>", "add_bos_token": True})


def _from_ranks(content: bytes, config: Mapping[str, Any]) -> Description:
    pattern = PATTERNS.get(str(config.get("tokenizer_class")))
    if pattern is None:
        raise ValueError(
            "it does not say how texts are divided, and tokenizer_class in tokenizer_config.json "
            f"is none of {', '.join(PATTERNS)}"
        )
    ids = read_tiktoken(content)
    added = _added(config)
    special = {token["content"]: token["id"] for token in added if token["special"]}
    description = ByteVocabulary(ids, pattern, special).description()
    return _beginning(_with(description, added), config)


def _from_model(content: bytes, config: Mapping[str, Any]) -> Description:
    # A message of protocol buffers begins with a field's number, a line of ranks with base64.
    first = content[:1]
    if first != b"\n":
        return _from_ranks(content, config)
    description = read_sentencepiece(content).description()
    return _beginning(_with(description, _added(config)), {"add_bos_token": True, **config})


_READERS: Mapping[str, Callable[[bytes, Mapping[str, Any]], Description]] = {
    "tokenizer.json": _from_json,
    "tekken.json": _from_tekken,
    "*.tiktoken": _from_ranks,
    "tiktoken.model": _from_ranks,
    "tokenizer.model": _from_model,
}


def _added(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The added tokens of a tokenizer's config, by id."""
    tokens = config.get("added_tokens_decoder") or {}
    return sorted(
        (
            {**added_token("", int(token_id), special=False), **token, "id": int(token_id)}
            for token_id, token in tokens.items()
        ),
        key=lambda token: int(token["id"]),
    )


def _with(description: Description, added: list[dict[str, Any]]) -> Description:
    """The description with more added tokens; those of the config replace its own."""
    by_id = {token["id"]: token for token in description["added_tokens"]}
    tokens = {**by_id, **{token["id"]: token for token in added}}
    return {**description, "added_tokens": [tokens[token_id] for token_id in sorted(tokens)]}


def _beginning(description: Description, config: Mapping[str, Any]) -> Description:
    """The description with the tokens that every text gets at its beginning and end."""
    ids = {token["content"]: token["id"] for token in description["added_tokens"]}
    before, after = (
        _name(config.get(f"{end}_token"), default) if config.get(f"add_{end}_token") else None
        for end, default in (("bos", "<s>"), ("eos", "</s>"))
    )
    around = [name for name in (before, after) if name in ids]
    if not around:
        return description
    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    if before in ids:
        single.insert(0, {"SpecialToken": {"id": before, "type_id": 0}})
    if after in ids:
        single.append({"SpecialToken": {"id": after, "type_id": 0}})
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    special = {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in around}
    processor = {"type": "TemplateProcessing", "single": single, "pair": pair}
    return {**description, "post_processor": {**processor, "special_tokens": special}}


def _name(token: object, default: str) -> str:
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else default
