"""Vocabularies of other formats tokenize as their own libraries do; small ones are trained here."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import sentencepiece
import tiktoken
from hypothesis import example, given
from hypothesis import strategies as st
from tests.text.folders import CORPUS, byte_level

from ferryman.errors import ConfigError
from ferryman.text.pieces import CHARACTER_OF_BYTE
from ferryman.text.tokenizer import Tokenizer
from ferryman.text.vocabulary.vocabulary_files import PATTERNS

TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            [*" ".join(CORPUS).split(), "  ", "\n\n", "\t", " ", "👍🏽", "日本", "e\u0301"]
        ),
        st.text(max_size=6),
        st.sampled_from("aeéß日Ωfr ▁.;1<>[]\x00\u200b").flatmap(
            lambda each: st.integers(1, 9).map(lambda times: each * times)
        ),
    ),
    max_size=12,
).map("".join)


def ranks() -> dict[bytes, int]:
    """A byte-level vocabulary trained on the corpus, as bytes with ranks."""
    described = json.loads(byte_level().to_str())
    byte_of = {character: byte for byte, character in CHARACTER_OF_BYTE.items()}
    merged = [
        bytes(byte_of[each] for each in left + right)
        for left, right in described["model"]["merges"]
    ]
    tokens = [*(bytes([byte]) for byte in range(256)), *merged]
    return {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}


def in_lines(ids: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ids.items())


def loaded(name: str, content: bytes, config: Mapping[str, object] | None = None) -> Tokenizer:
    """The tokenizer of a folder with one file, and perhaps a config."""
    with TemporaryDirectory() as folder:
        (Path(folder) / name).write_bytes(content)
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config or {}))
        return Tokenizer.load(folder)


def added(*names: str, first: int) -> dict[str, Any]:
    return {
        str(first + place): {"content": name, "special": True} for place, name in enumerate(names)
    }


@pytest.mark.parametrize("class_name", PATTERNS)
@given(text=TEXTS)
def test_tiktoken_files_tokenize_as_tiktoken_does(class_name: str, text: str) -> None:
    ours, theirs = _tiktoken_pair(class_name)
    expected = theirs.encode_ordinary(text)
    assert ours.encode(text).tolist() == expected
    assert ours.decode(expected) == theirs.decode(expected)


@cache
def _tiktoken_pair(class_name: str) -> tuple[Tokenizer, tiktoken.Encoding]:
    ids = ranks()
    tokens = added("<|end|>", first=len(ids))
    config = {"tokenizer_class": class_name, "added_tokens_decoder": tokens}
    encoding = tiktoken.Encoding(
        "small",
        pat_str=PATTERNS[class_name],
        mergeable_ranks=ids,
        special_tokens={"<|end|>": len(ids)},
    )
    return loaded("small.tiktoken", in_lines(ids), config), encoding


TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NUM_SPECIAL = 30


@given(text=TEXTS)
def test_tekken_files_tokenize_as_tiktoken_does_after_their_special_tokens(text: str) -> None:
    ours, theirs = _tekken_pair()
    expected = [1, *(rank + NUM_SPECIAL for rank in theirs.encode_ordinary(text))]
    assert ours.encode(text).tolist() == expected
    assert ours.decode(expected) == text


@cache
def _tekken_pair() -> tuple[Tokenizer, tiktoken.Encoding]:
    ids = ranks()
    kept = dict(list(ids.items())[:-10])
    encoding = tiktoken.Encoding(
        "small", pat_str=TEKKEN_PATTERN, mergeable_ranks=kept, special_tokens={}
    )
    return loaded("tekken.json", json.dumps(tekken(ids, len(kept))).encode()), encoding


def tekken(ids: dict[bytes, int], num_kept: int, **more: object) -> dict[str, Any]:
    return {
        "config": {
            "pattern": TEKKEN_PATTERN,
            "num_vocab_tokens": len(ids),
            "default_vocab_size": num_kept + NUM_SPECIAL,
            "default_num_special_tokens": NUM_SPECIAL,
            "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for token, rank in ids.items()
        ],
        **more,
    }


def test_tekken_special_tokens_are_those_of_the_file_and_the_rest_is_filled(tmp_path: Path) -> None:
    listed = [{"rank": 1, "token_str": "<s>", "is_control": True}, {"rank": 2, "token_str": "[X]"}]
    raw = tekken(ranks(), 300, special_tokens=listed)
    (tmp_path / "tekken.json").write_text(json.dumps(raw))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("[X]", parse_special=True).tolist() == [1, 2]
    assert 2 not in tokenizer.encode("[X]").tolist()
    assert tokenizer.encoder.id_to_token(29) == "<SPECIAL_29>"
    assert tokenizer.vocab_size == 330


def trained(**options: object) -> bytes:
    """A small model; what the options do not say is as in Llama 2."""
    model = io.BytesIO()
    chosen: dict[str, Any] = {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "vocab_size": 400,
        "character_coverage": 0.99,
        "hard_vocab_limit": False,
        **options,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, minloglevel=9, num_threads=1, **chosen
    )
    return model.getvalue()


MODELS: dict[str, dict[str, object]] = {
    "Llama 2": {},
    "Gemma": {"add_dummy_prefix": False, "user_defined_symbols": ["▁▁", "▁▁▁", "\n\n", "<turn>"]},
    "without bytes": {"byte_fallback": False, "vocab_size": 120},
    "with control symbols": {"control_symbols": ["[INST]", "[/INST]"]},
}


@pytest.mark.parametrize("name", MODELS)
@given(text=TEXTS)
@example(text="<unk>")
@example(text="a<s>b<0x41>")
def test_sentencepiece_models_tokenize_as_sentencepiece_does(name: str, text: str) -> None:
    ours, theirs = _piece_pair(name)
    expected = theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False).tolist() == expected


@cache
def _piece_pair(name: str) -> tuple[Tokenizer, sentencepiece.SentencePieceProcessor]:
    model = trained(**MODELS[name])
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    return loaded("tokenizer.model", model), theirs


def test_a_model_of_pieces_has_its_first_token_and_reads_its_control_tokens(tmp_path: Path) -> None:
    model = trained(control_symbols=["[INST]"])
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    ours = loaded("tokenizer.model", model)
    assert ours.encode("the ferry").tolist() == theirs.encode("the ferry", add_bos=True)
    control = theirs.piece_to_id("[INST]")
    assert ours.encode("[INST]", parse_special=True).tolist() == [theirs.bos_id(), control]
    assert control not in ours.encode("[INST]").tolist()
    assert ours.decode(theirs.encode("the ferry waits")) == "the ferry waits"
    without = loaded("tokenizer.model", model, {"add_bos_token": False, "add_eos_token": True})
    assert without.encode("the ferry").tolist() == theirs.encode("the ferry", add_eos=True)


def test_a_tokenizer_model_of_ranks_is_read_as_one() -> None:
    ids = ranks()
    names = ("<|begin_of_text|>", "<|eot_id|>")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added(*names, first=len(ids)),
        "bos_token": {"content": names[0]},
        "eos_token": names[1],
        "add_bos_token": True,
    }
    tokenizer = loaded("tokenizer.model", in_lines(ids), config)
    assert tokenizer.encode("a").tolist() == [len(ids), ids[b"a"]]
    assert tokenizer.eos_token_ids == {len(ids) + 1}


def test_a_long_text_is_refused_unread_in_each_format() -> None:
    """Every byte has a token, so that there is a bound."""
    for tokenizer in (_tekken_pair()[0], _tiktoken_pair("QWenTokenizer")[0]):
        assert tokenizer.max_token_bytes is not None
    assert _piece_pair("Llama 2")[0].max_token_bytes is not None


BROKEN: dict[str, tuple[str, bytes, str]] = {
    "no file": ("other.json", b"", "tokenizer.json is missing, and so are"),
    "no JSON": ("tokenizer.json", b"{", "tokenizer.json is no vocabulary"),
    "a list": ("tokenizer.json", b"[]", "must hold a JSON object"),
    "an empty object": ("tokenizer.json", b"{}", "tokenizer.json is no tokenizer"),
    "ranks of no known class": ("small.tiktoken", b"YQ== 0", "does not say how texts are divided"),
    "no tekken": ("tekken.json", b"{}", "tekken.json is no vocabulary"),
    "a field cut off": ("tokenizer.model", b"\n\xff", "ends within"),
    "a number without end": ("tokenizer.model", b"\n" + b"\xff" * 20, "more than 64 bits"),
    "a piece that is no message": ("tokenizer.model", b"\n\x02\x0a\x09", "ends within a field"),
    "a wrong wire type": ("tokenizer.model", b"\n\x02\x0b\x09", "wire type 3"),
    "no unknown piece": ("tokenizer.model", b"\n\x03\x0a\x01a\x1a\x02\x20\x00", "no pieces"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_is_no_vocabulary_is_refused_by_name(case: str) -> None:
    name, content, complaint = BROKEN[case]
    with pytest.raises(ConfigError, match=complaint):
        loaded(name, content)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"YQ== x", "line 1 is no token and rank"),
        (b"YQ== 0\nYg== 0", "two tokens have one rank"),
        (b"YQ== 0", "byte 0 has no token"),
        (b"= 0", "is no vocabulary"),
        (base64.b64encode(b"a" * 2000) + b" 0", "a token has 2000 bytes"),
    ],
)
def test_ranks_that_are_none_are_refused(content: bytes, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        loaded("small.tiktoken", content, {"tokenizer_class": "QWenTokenizer"})


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"normalization_rule_name": "nmt_nfkc"}, "it normalises texts"),
        ({"remove_extra_whitespaces": True}, "it normalises texts"),
        ({"treat_whitespace_as_suffix": True}, "writes spaces otherwise"),
        ({"user_defined_symbols": ["<turn>"]}, "user-defined pieces and a space before"),
        ({"model_type": "char"}, "is not a valid ModelType"),
        ({"model_type": "unigram"}, "it is a unigram model; only BPE is exact"),
    ],
)
def test_a_model_that_cannot_be_described_exactly_is_refused(
    options: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        loaded("tokenizer.model", trained(**options))


@example(846, 0x11)  # a score of eight bytes
@given(st.integers(0, 2**20), st.integers(0, 255))
def test_a_damaged_model_is_refused_or_read_and_nothing_else(at: int, byte: int) -> None:
    content = bytearray(_small_model())
    content[at % len(content)] = byte
    with suppress(ConfigError):
        loaded("tokenizer.model", bytes(content)).encode("the ferry")


@cache
def _small_model() -> bytes:
    return trained()
