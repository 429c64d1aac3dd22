"""The tokenizer of a GGUF file is that of the folder that it was made from."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.gguf_models.files import floats, write
from tests.text.folders import CORPUS, byte_level
from tools.bench.gguf.container import Setting
from transformers import GemmaTokenizer

from ferryman.errors import ConfigError
from ferryman.gguf.documents import has_document, read_document
from ferryman.text.tokenizer import Tokenizer
from ferryman.text.vocabulary.text_divisions import DIVISIONS

TYPES = "tokenizer.ggml.token_type"
CONTROL, USER = "<|im_end|>", "<think>"
TEXTS = st.lists(
    st.one_of(
        st.sampled_from([*" ".join(CORPUS).split(), "  ", "\n\n", "\t", " ", "12", "½", "don't"]),
        st.sampled_from([CONTROL, USER, "<|im_end", "日本", "e\u0301", "HTTPServer", "\r\n 1"]),
        st.text(max_size=6),
    ),
    max_size=12,
).map("".join)
# A file is read once for all texts of a test.
ONCE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


def byte_metadata(pre: str) -> tuple[dict[str, Setting], dict[str, Any]]:
    """The metadata of a vocabulary of bytes, and what `tokenizer.json` says of it."""
    described = json.loads(byte_level().to_str())
    vocab, merges = described["model"]["vocab"], described["model"]["merges"]
    added = {token["content"] for token in described["added_tokens"]}
    tokens = [*(token for token in sorted(vocab, key=vocab.get) if token not in added)]
    tokens += [CONTROL, USER]
    types = [1] * (len(tokens) - 2) + [3, 4]
    metadata: dict[str, Setting] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
    }
    return metadata, {**described, "vocab": tokens, "merges": merges}


def saved(file: Path, metadata: Mapping[str, Setting]) -> Path:
    """Writes a file with the vocabulary, and with as much of a model as its config needs."""
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    sizes: dict[str, Setting] = {
        "context_length": 64,
        "embedding_length": 8,
        "block_count": 1,
        "feed_forward_length": 8,
        "attention.head_count": 1,
        "attention.layer_norm_rms_epsilon": 0.5,
    }
    keys = {f"llama.{key}": value for key, value in sizes.items()}
    embedding = floats("token_embd.weight", np.zeros((len(tokens), 8), dtype=np.float32))
    return write(file, {**keys, **metadata}, [embedding])


PUBLISHED: Mapping[str, list[dict[str, Any]]] = {
    "gpt-2": [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}],
    # HuggingFaceTB/SmolLM2, bigcode/starcoder2, ibm-granite/granite-3: tokenizer.json.
    "smollm": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    ],
    # Qwen/Qwen3: tokenizer.json.
    "deepseek-r1-qwen": [
        {
            "type": "Split",
            "pattern": {
                "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            },
            "behavior": "Isolated",
            "invert": False,
        },
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
    ],
}


@pytest.mark.parametrize("pre", PUBLISHED)
@ONCE
@given(text=TEXTS)
def test_texts_divide_as_by_the_published_pre_tokenizer(
    text: str, pre: str, tmp_path: Path
) -> None:
    file, folder = tmp_path / "vocab.gguf", tmp_path / "folder"
    if not folder.exists():
        metadata, described = byte_metadata(pre)
        saved(file, metadata)
        folder.mkdir()
        _write_published(folder, pre, described)
    ours, theirs = Tokenizer.load(file), Tokenizer.load(folder)
    for honours in (False, True):
        expected = theirs.encode(text, parse_special=honours).tolist()
        assert ours.encode(text, parse_special=honours).tolist() == expected
    assert ours.decode(expected, skip_special_tokens=False) == text


def _write_published(folder: Path, pre: str, described: Mapping[str, Any]) -> None:
    steps = [{"trim_offsets": True, **step} for step in PUBLISHED[pre]]
    vocab = {token: token_id for token_id, token in enumerate(described["vocab"])}
    added = [
        {
            "id": vocab[name],
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": name == CONTROL,
        }
        for name in (CONTROL, USER)
    ]
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": added,
                "normalizer": None,
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
                "post_processor": None,
                "decoder": {
                    "type": "ByteLevel",
                    "add_prefix_space": True,
                    "trim_offsets": True,
                    "use_regex": True,
                },
                "model": {"type": "BPE", "vocab": vocab, "merges": described["merges"]},
            }
        )
    )


@pytest.mark.parametrize("pre", DIVISIONS)
def test_every_division_keeps_a_text_whole(pre: str, tmp_path: Path) -> None:
    metadata, _ = byte_metadata(pre)
    tokenizer = Tokenizer.load(saved(tmp_path / "vocab.gguf", metadata))
    text = "  Don't PANIC: 1234½ käse\r\n\n\t日本語, HTTPServer/v2 <think>… "
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_sentencepiece_vocabulary_tokenizes_as_its_library_does(tmp_path: Path) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(theirs.get_piece_size())
    kinds = ((2, theirs.is_unknown), (3, theirs.is_control), (6, theirs.is_byte))
    types = [next((kind for kind, has in kinds if has(i)), 1) for i in ids]
    metadata: dict[str, Setting] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [theirs.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [theirs.get_score(i) for i in ids],
        TYPES: types,
        "tokenizer.ggml.bos_token_id": theirs.bos_id(),
        "tokenizer.ggml.eos_token_id": theirs.eos_id(),
        "general.architecture": "llama",
    }
    ours = Tokenizer.load(saved(tmp_path / "vocab.gguf", metadata))
    for text in (*CORPUS, "a  b ", " 日本 ½\n", "\t'x'"):
        assert ours.encode(text).tolist() == [theirs.bos_id(), *theirs.encode(text)]
    bare = {**metadata, "tokenizer.ggml.add_bos_token": False}
    ours = Tokenizer.load(saved(tmp_path / "bare.gguf", bare))
    assert ours.encode("hello").tolist() == theirs.encode("hello")
    # llama.cpp's converter lists the unknown piece among control tokens, as published folders do.
    listed: dict[str, Setting] = {**bare, TYPES: [3 if kind == 2 else kind for kind in types]}
    for keys in ({}, {"tokenizer.ggml.unknown_token_id": theirs.unk_id()}):
        ours = Tokenizer.load(saved(tmp_path / "listed.gguf", {**listed, **keys}))
        for text in (*CORPUS, "a  b ", " 日本 ½\n", "\t'x'"):
            assert ours.encode(text).tolist() == theirs.encode(text)


def test_pieces_with_merges_tokenize_as_by_the_code_of_gemma(tmp_path: Path) -> None:
    named = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|tool>"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += [*"abdehlort", "▁", "\n", "▁▁", "\n\n", "he", "ll", "hell", "hello", "▁a"]
    merges = ["▁ ▁", "\n \n", "h e", "l l", "he ll", "hell o", "▁ a"]
    tokens = [*named, *pieces]
    metadata: dict[str, Setting] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 5 + [4] + [6] * 256 + [1] * (len(pieces) - 256),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
    }
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    theirs = GemmaTokenizer(vocab, [tuple(pair.split(" ")) for pair in merges])
    ours = Tokenizer.load(saved(tmp_path / "vocab.gguf", metadata))
    for text in ("hello  hello\n\n\nheart", " a ab 日本 ½\n", "\t'x'▁", "orla   "):
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text).tolist() == [2, *ids]
        assert ours.decode(ids, skip_special_tokens=False) == text.replace("▁", " ")
    assert ours.encode("a<|tool>").tolist() == [2, vocab["a"], vocab["<|tool>"]]
    bare = {key: value for key, value in metadata.items() if "unknown" not in key}
    with pytest.raises(ConfigError, match=r"unknown_token_id' must be given"):
        Tokenizer.load(saved(tmp_path / "bare.gguf", bare))


def test_ends_templates_and_sampling_come_from_the_file(tmp_path: Path) -> None:
    metadata, _ = byte_metadata("llama-bpe")
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    more: dict[str, Setting] = {
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "tokenizer.chat_template.tool_use": "tools: {{ messages[0].content }}",
        "general.sampling.temp": 0.25,
        "general.sampling.top_k": 20,
    }
    file = saved(tmp_path / "vocab.gguf", {**metadata, **more})
    tokenizer = Tokenizer.load(file)
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.spelt(ids.tolist()) == f"{CONTROL}hi"
    # A text begins with a token of its own by this division, a chat by its template.
    assert tokenizer.encode("hi").tolist() == ids.tolist()
    assert read_document(file / "generation_config.json") == {"temperature": 0.25, "top_k": 20}
    assert has_document(file / "tokenizer.json")
    assert not has_document(file / "special_tokens_map.json")


REFUSED: Mapping[str, tuple[Mapping[str, Setting], str]] = {
    "model": ({"tokenizer.ggml.model": "t5"}, "must be gpt2, llama or gemma4"),
    "division": ({"tokenizer.ggml.pre": "llama-bpf"}, r"the nearest is llama-bpe"),
    "merges": ({"tokenizer.ggml.merges": ["a b c"]}, "pairs of tokens"),
    "types": ({"tokenizer.ggml.token_type": [1]}, r"numbers from 1 to 6; it is an array"),
    "twice": (
        {
            "tokenizer.ggml.tokens": ["a", "a"],
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 0,
        },
        "of tokens that differ",
    ),
    "bos": ({"tokenizer.ggml.bos_token_id": 10**6}, "less than the"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_vocabulary_that_is_not_understood_is_refused_by_its_key(
    name: str, tmp_path: Path
) -> None:
    keys, message = REFUSED[name]
    metadata, _ = byte_metadata("llama-bpe")
    file = saved(tmp_path / "vocab.gguf", {**metadata, **keys})
    with pytest.raises(ConfigError, match=message):
        Tokenizer.load(file)
