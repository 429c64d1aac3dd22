"""Pieces of text join to the whole text, and half a character is never shown."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.text.folders import write_folder

from ferryman.errors import ConfigError, InvalidRequest
from ferryman.text.detokenizer import REPLACEMENT
from ferryman.text.tokenizer import Tokenizer

TEXT = "the ferryman waits; héllo 日本語 👍🏽 and seventeen wagons"


def _pieces(tokenizer: Tokenizer, token_ids: list[int], sizes: list[int]) -> list[str]:
    detokenizer, pieces, start = tokenizer.detokenizer(), [], 0
    for size in [*sizes, len(token_ids)]:
        pieces.append(detokenizer.feed(token_ids[start : start + size]))
        start += size
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_pieces_join_to_what_decoding_at_once_gives(tokenizer: Tokenizer, size: int) -> None:
    token_ids = tokenizer.encode(TEXT).tolist()
    pieces = _pieces(tokenizer, token_ids, [size] * len(token_ids))
    assert "".join(pieces) == tokenizer.decode(token_ids)


def test_a_character_spread_over_tokens_appears_whole(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("Ω👍🏽").tolist()
    assert all(REPLACEMENT not in piece for piece in _pieces(tokenizer, token_ids, [1] * 30))


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40), sizes=st.lists(st.integers(0, 4), max_size=60))
def test_any_text_survives_the_round_trip_in_any_pieces(
    byte_level: Tokenizer, text: str, sizes: list[int]
) -> None:
    token_ids = byte_level.encode(text).tolist()
    assert "".join(_pieces(byte_level, token_ids, sizes)) == byte_level.decode(token_ids)


@settings(max_examples=60, deadline=None)
@given(token_ids=st.lists(st.integers(0, 400), max_size=40))
def test_random_token_ids_give_what_the_library_gives(
    byte_level: Tokenizer, token_ids: list[int]
) -> None:
    assert "".join(_pieces(byte_level, token_ids, [1] * 40)) == byte_level.decode(token_ids)


def test_bytes_that_never_become_whole_end_as_a_replacement(byte_level: Tokenizer) -> None:
    first = byte_level.encode("👍").tolist()[0]
    detokenizer = byte_level.detokenizer()
    assert detokenizer.feed([first]) == ""
    assert detokenizer.flush() == REPLACEMENT


def test_words_that_go_on_behind_a_prompt_keep_their_space(tmp_path_factory: object) -> None:
    assert isinstance(tmp_path_factory, pytest.TempPathFactory)
    tokenizer = Tokenizer.load(write_folder(tmp_path_factory.mktemp("words"), "word_piece"))
    prompt, answer = tokenizer.encode("the ferry"), tokenizer.encode("carries")[1:]
    assert tokenizer.detokenizer(prompt.tolist()).feed(answer.tolist()).startswith(" ")


def test_special_tokens_are_not_text_but_have_a_name(tokenizer: Tokenizer) -> None:
    (end,) = tokenizer.eos_token_ids
    assert tokenizer.detokenizer().feed([end]) == ""
    assert tokenizer.token_bytes(end) == b"</s>"
    assert tokenizer.encode("a b").dtype == np.dtype("<u4")


def test_a_chat_is_rendered_with_its_special_tokens(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode_chat([{"role": "user", "content": "the ferry"}])
    user, assistant = (byte_level.encoder.token_to_id(f"<|{r}|>") for r in ("user", "assistant"))
    assert (token_ids[0], token_ids[-1]) == (user, assistant)


def test_a_lone_surrogate_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="Unicode"):
        byte_level.encode("\ud800")


def test_a_folder_without_a_tokenizer_is_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("empty")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="no tokenizer"):
        Tokenizer.load(folder)


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("bytes"), "byte_level"))
