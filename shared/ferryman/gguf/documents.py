"""The documents of a Hugging Face folder, made from the metadata of a GGUF file.

The path of a GGUF file stands for a folder: `FILE.gguf/config.json` is the config that the model's
folder has. Nothing is written.

    config.json               sizes, by the architecture's reader
    tokenizer_config.json     names of special tokens, the chat template
    generation_config.json    the sampling that the file recommends

`tokenizer.json` is made where text is read (`text/vocabulary/gguf_vocabulary.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ferryman.gguf.architectures import config_of
from ferryman.gguf.model_file import GgufFile, GgufMetadata, is_gguf, read_model

TOKENIZER = "tokenizer.json"
TEMPLATE = "tokenizer.chat_template"
TOKENS = "tokenizer.ggml.tokens"
_SPECIAL = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",
    "mask_token": "mask",
}
# Fields of generation_config.json by the keys of recommended sampling.
_SAMPLING = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def has_document(path: Path) -> bool:
    """Whether the file `path` is in a folder, or the document in a GGUF file."""
    if not is_gguf(path.parent):
        return path.is_file()
    if path.name == TOKENIZER:
        return read_model(path.parent).metadata.has(TOKENS)
    return path.name in _DOCUMENTS


def read_document(path: Path) -> dict[str, Any] | None:
    """The document, or None if it is in a folder. Raises ConfigError, by name, for a key that is
    missing or wrong, and FileNotFoundError for a document that no GGUF file has."""
    if not is_gguf(path.parent):
        return None
    if path.name not in _DOCUMENTS:
        raise FileNotFoundError(path)
    return _DOCUMENTS[path.name](read_model(path.parent))


def _tokenizer_config(model: GgufFile) -> dict[str, Any]:
    metadata = model.metadata
    document: dict[str, Any] = {}
    if metadata.has(TOKENS):
        tokens = metadata.words(TOKENS)
        ids = {name: f"tokenizer.ggml.{key}_token_id" for name, key in _SPECIAL.items()}
        document = {
            name: _token(metadata, tokens, key) for name, key in ids.items() if metadata.has(key)
        }
    templates = _templates(metadata)
    return {**document, **({"chat_template": templates} if templates else {})}


def _token(metadata: GgufMetadata, tokens: list[str], key: str) -> str:
    token_id = metadata.whole(key)
    if token_id >= len(tokens):
        raise metadata.refusal(key, f"less than the {len(tokens)} tokens of the vocabulary")
    return tokens[token_id]


def _templates(metadata: GgufMetadata) -> list[dict[str, str]]:
    """The default template and those with a name."""
    keys = {"default": TEMPLATE}
    for key in metadata.values:
        if key.startswith(f"{TEMPLATE}."):
            keys[key.removeprefix(f"{TEMPLATE}.")] = key
    return [
        {"name": name, "template": metadata.text(key)}
        for name, key in keys.items()
        if metadata.has(key)
    ]


def _generation_config(model: GgufFile) -> dict[str, Any]:
    metadata = model.metadata
    keys = {name: f"general.sampling.{key}" for name, key in _SAMPLING.items()}
    return {name: metadata.number(key) for name, key in keys.items() if metadata.has(key)}


_DOCUMENTS: Mapping[str, Callable[[GgufFile], dict[str, Any]]] = {
    "config.json": config_of,
    "tokenizer_config.json": _tokenizer_config,
    "generation_config.json": _generation_config,
}
