"""How llama.cpp itself divides and merges a page of text, by `tokenizer.ggml.pre`.

The vocabulary is learnt from the page without any division, so that a line left whole is one token
and every division shows in the tokens. A few words are tokens that no merge makes: they are used
where a piece that is a token is not divided further.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
from tests.gguf_models.files import write
from tokenizers import decoders, models, pre_tokenizers, trainers
from tools.bench.gguf.container import Setting
from tools.bench.llama_contender import load_llama_cpp

from ferryman.text.vocabulary.text_divisions import DIVISIONS

PAGE = (
    "The ferry carries state across the river, and back again.",
    "  two spaces, a\ttab,\r\n lines\n\n\n and a trailing one ",
    "Grüße aus Zürich, ça va? Привет, мир. 你好，世界。こんにちは 안녕하세요 שלום مرحبا",
    "👍🏽 👨‍👩‍👧‍👦 🇨🇭 é ½ Ω ﬁ — “quoted” … ！",
    'def f(x):\n    return {"a": [1, 2.5e-3, None], "b": "//é"}  # ok\n/',
    "0123456789 1234567 3.14159 -1e10 0xDEADBEEF 1,000,000 ٣٤٥٦",
    "I'm sure HE'LL say: don't! WE'VE said'd it's HTTP'S",
    "<b>&amp;</b> [INST] $5+$6=~`x^y|z` ...!!! ?? --- == a/b\\c /n/",
    "\n \n\n\t\t\n   \n x\r\n\r\ny   ",
    "我想在apple工作1314天～ ------======= нещо",
    "កាន់តែ हिन्दी ไทย",
    "нещо ÉCOLE ñandú ŻÓŁĆ ÉCOLE ÓŁĆ",
    "iPhone CamelCase eBay",
    ";\n!\n?\n%\n",
)
"""In Unicode's form NFC: llama.cpp composes no text."""
WHOLE = ("ferry", "Ġriver", "Grüße", "Ġtrailing", "ä½łå¥½")
"""Tokens that no merge makes, in the letters that stand for bytes."""
END = "<|end|>"
NUM_TOKENS = 1400


def vocabulary_keys(pre: str, merges: Sequence[str]) -> dict[str, Setting]:
    """The metadata of a vocabulary of bytes, `merges`, and an end token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = list(dict.fromkeys([*letters, *(merge.replace(" ", "") for merge in merges), *WHOLE]))
    tokens.append(END)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": len(tokens) - 1,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }


def learnt_merges() -> list[str]:
    """Merges of the page's lines, which nothing divides, and after them all pairs of neighbours, so
    that two bytes which are left over show whether they are in one piece."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    bytes_alone: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer, tokenizer.decoder = bytes_alone, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator(PAGE, trainer=trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    learnt = [" ".join(pair) for pair in merges if "".join(pair) not in WHOLE]
    lines = [bytes_alone.pre_tokenize_str(line)[0][0] for line in PAGE]
    pairs = (" ".join(pair) for line in lines for pair in pairwise(line))
    return list(dict.fromkeys([*learnt, *pairs]))


def record_divisions(scratch: Path) -> dict[str, Any]:
    """The page, the merges, and llama.cpp's tokens of each line, by the names that agree. Raises
    ConfigError if llama-cpp-python is not installed."""
    merges, lib = learnt_merges(), load_llama_cpp()
    lib.llama_backend_init()
    names: dict[str, list[str]] = {}
    for pre in DIVISIONS:
        file = write(scratch / "vocabulary.gguf", vocabulary_keys(pre, merges))
        names.setdefault(json.dumps(_tokens(lib, file)), []).append(pre)
    answers = [{"pre": pres, "token_ids": json.loads(ids)} for ids, pres in names.items()]
    return {"page": list(PAGE), "merges": merges, "answers": answers}


def _tokens(lib: Any, file: Path) -> list[list[int]]:
    """llama.cpp's tokens of each line, with those that it puts at a text's beginning."""
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(bytes(file), params)
    vocabulary, answers = lib.llama_model_get_vocab(model), []
    for line in PAGE:
        text = line.encode()
        room = (ctypes.c_int32 * (len(text) + 8))()
        count = lib.llama_tokenize(vocabulary, text, len(text), room, len(room), True, False)
        answers.append(list(room[:count]))
    lib.llama_model_free(model)
    return answers
