"""Small tokenizer folders, made by the tests, one for each kind of decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "the ferry carries state across the river and back again",
    "seventeen wagons wait; the ferryman waits for nobody.",
    "héllo wörld, 日本語 and 👍🏽 and Ω",
] * 4
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{{ m['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level() -> Any:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer.add_tokens(["[plain added]"])
    return tokenizer


def byte_fallback() -> Any:
    tokenizer = _byte_fallback()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def byte_window() -> Any:
    """Characters of several tokens, and a decoder that a table of pieces cannot represent."""
    tokenizer = _byte_fallback()
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace(Regex("▁"), " ")]
    )
    return tokenizer


def _byte_fallback() -> Any:
    vocab = {token: i for i, token in enumerate(["<unk>", *SPECIAL])}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for character in "▁abcdefghijklmnopqrstuvwxyz.;":
        vocab[character] = len(vocab)
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def word_piece() -> Any:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(
            vocab_size=200, special_tokens=["<unk>", *SPECIAL], show_progress=False
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


KINDS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "byte_window": byte_window,
    "word_piece": word_piece,
}


def write_folder(folder: Path, kind: str = "byte_level") -> Path:
    """A folder with a tokenizer, special tokens and a chat template; no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = KINDS[kind]()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    eos = tokenizer.token_to_id("</s>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos]}))
    return folder
