"""Log probabilities belong to tokens, not to texts: none is lost where texts are alike or are no
text at all, and each token is where it begins in the answer, streamed in any cut and whole."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.folders import KINDS, write_folder

from ferryman.cache.manifest import Exactness
from ferryman.handoff.offsets import TokenFrame, extend_hash
from ferryman.schedule.request import FinishReason, SamplingParams
from ferryman.text.located_prompt import LocatedPrompt
from ferryman.text.tokenizer import Tokenizer
from ferryman.wire.public import GenerateFinished, TokenPrompt
from ferryman.wire.values import RequestTokens, Usage
from ferryman_router.answers.completion_output import CompletionFormat
from ferryman_router.answers.logprobs import TokenNames, chat_logprobs, echoed_offsets
from ferryman_router.answers.response_format import AnsweredChoice
from ferryman_router.answers.response_header import ResponseHeader
from ferryman_router.request.metrics import RouterMetrics
from ferryman_router.request.response import OutputLog, ResponseStream
from ferryman_router.routing.generate_request import (
    PUBLIC,
    Caller,
    GenerateRequest,
    RequestedSampling,
    TextOptions,
    TokenizedRequest,
)

PROMPT = (1, 9, 12)
TEXTS = ("the ferry waits; héllo 日本語 👍🏽 and waits", "日本", "a\N{REPLACEMENT CHARACTER}b", "")


@pytest.fixture(scope="module", params=sorted(KINDS))
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    folder = tmp_path_factory.mktemp(str(request.param))
    return Tokenizer.load(write_folder(folder, str(request.param)))


@dataclass(frozen=True)
class Said:
    """An answer, and the answer's form over HTTP."""

    log: OutputLog
    form: CompletionFormat

    @property
    def end(self) -> GenerateFinished:
        assert isinstance(self.log.end, GenerateFinished)
        return self.log.end

    @property
    def answer(self) -> AnsweredChoice:
        return AnsweredChoice(self.log.chunks, self.end)

    def whole(self) -> Any:
        return json.loads(self.form.choice(0, self.answer))

    def streamed(self) -> list[Any]:
        frames = [self.form.tokens(0, chunk) for chunk in self.log.chunks]
        frames.append(self.form.last(0, self.answer))
        lines = b"".join(frames).split(b"\n\n")[:-1]
        return [json.loads(line.removeprefix(b"data: "))["choices"][0] for line in lines]


def logprobs_of(token_ids: tuple[int, ...], vocab: int, seed: int) -> list[Mapping[int, float]]:
    """A few alternatives at each place, the drawn one somewhere among them."""
    rng = random.Random(seed)
    places = list[Mapping[int, float]]()
    for drawn in token_ids:
        others = [*rng.sample(range(vocab), 5), drawn]
        rng.shuffle(others)
        places.append({token_id: -1.0 - at / 8 for at, token_id in enumerate(others)})
    return places


def said(
    tokenizer: Tokenizer,
    token_ids: tuple[int, ...],
    *,
    cuts: tuple[int, ...] = (),
    stop: tuple[str, ...] = (),
    shows_special: bool = False,
    seed: int = 0,
) -> Said:
    """An answer of these tokens, as workers sent them in frames with these ends."""
    params = SamplingParams(stop=stop, logprobs=5)
    ids = np.array(PROMPT, dtype="<u4")
    shown = tokenizer.control_tokens if shows_special else frozenset[str]()
    request = GenerateRequest(
        Caller("request", PUBLIC, 10.0, ""),
        "",
        TokenPrompt(ids),
        RequestedSampling(params),
        arrived=0.0,
        text=TextOptions(shown),
    )
    asked = TokenizedRequest(request, LocatedPrompt(ids), params, frozenset())
    stream = ResponseStream(asked, tokenizer, RouterMetrics(), lambda: 1.0)
    stream.begin_attempt(1)
    logprobs = logprobs_of(token_ids, tokenizer.vocab_size, seed)
    ends = sorted({cut % (len(token_ids) + 1) for cut in cuts} | {len(token_ids)})
    begin = 0
    for end in ends:
        if end > begin:
            frame = TokenFrame(1, begin, token_ids[begin:end], extend_hash(0, token_ids[:end]))
            stream.take(RequestTokens("request", frame, tuple(logprobs[begin:end])))
        begin = end
    reason = FinishReason.STOP if stream.has_stopped else FinishReason.LENGTH
    stream.finish(reason, Usage(1), Exactness.BITS)
    heading = ResponseHeader("cmpl-1", "m", 0, 5, TokenNames(tokenizer))
    detokenizer = partial(tokenizer.detokenizer, visible=shown)
    return Said(stream.output_log, CompletionFormat(heading, [PROMPT], detokenizer))


def joined(frames: list[Any]) -> tuple[str, dict[str, list[Any]]]:
    lists: dict[str, list[Any]] = {}
    for frame in frames:
        for name, values in (frame["logprobs"] or {}).items():
            lists[name] = lists.get(name, []) + values
    return "".join(frame["text"] for frame in frames), lists


@given(data=st.data())
def test_every_token_has_its_value_and_its_place(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = st.integers(0, tokenizer.vocab_size - 1)
    encoded = st.sampled_from(TEXTS).map(
        lambda text: tokenizer.encode(text, add_special_tokens=False).tolist()
    )
    token_ids = tuple(data.draw(st.one_of(st.lists(ids, max_size=12), encoded)))
    stops = st.sampled_from([(), ("y w",), ("日本",), ("a", " "), ("\N{REPLACEMENT CHARACTER}",)])
    answer = said(
        tokenizer,
        token_ids,
        cuts=tuple(data.draw(st.lists(st.integers(0, 40), max_size=6))),
        stop=data.draw(stops),
        shows_special=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 99)),
    )
    whole = answer.whole()
    lists, text = whole["logprobs"], whole["text"]
    assert joined(answer.streamed()) == (text, lists), "a stream says the same"
    shown = [token_id for chunk in answer.log.chunks for token_id in chunk.token_ids]
    given_values = [values for chunk in answer.log.chunks for values in chunk.logprobs]
    assert {len(values) for values in lists.values()} == {len(shown)}
    for place, values in enumerate(given_values):
        best = sorted(values.values(), reverse=True)[:5]
        drawn = values[shown[place]]
        top, name = lists["top_logprobs"][place], lists["tokens"][place]
        assert sorted(top.values(), reverse=True) == sorted({*best, drawn}, reverse=True)
        assert top[name] == lists["token_logprobs"][place] == drawn
    offsets = lists["text_offset"]
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(text) for offset in offsets)
    detokenizer = tokenizer.detokenizer(PROMPT, frozenset())
    if not answer.end.matched_stop and text == tokenizer.decode(list(shown)):
        for token_id, offset in zip(shown, offsets, strict=True):
            piece = detokenizer.feed([token_id])
            assert text[offset:].startswith(piece)


@pytest.mark.parametrize("stop", ["ferry walks", "the ferry waits!", "y wa", "zz"])
def test_tokens_held_back_as_a_stop_string_are_placed_when_it_is_none(
    byte_level: Tokenizer, stop: str
) -> None:
    text = "a the ferry waits; zzz"
    token_ids = tuple(byte_level.encode(text, add_special_tokens=False).tolist())
    answer = said(byte_level, token_ids, stop=(stop,))
    shown, lists = joined(answer.streamed())
    assert shown == text.partition(stop)[0]
    pieces = [byte_level.token_bytes(token_id).decode() for token_id in token_ids]
    begins = [len("".join(pieces[:place])) for place in range(len(lists["tokens"]))]
    assert lists["text_offset"] == [min(begin, len(shown)) for begin in begins]
    assert lists == answer.whole()["logprobs"]


def test_halves_of_characters_are_called_by_their_bytes(byte_level: Tokenizer) -> None:
    token_ids = tuple(byte_level.encode("né 日", add_special_tokens=False).tolist())
    whole = said(byte_level, token_ids).whole()
    lists, text = whole["logprobs"], whole["text"]
    assert text == "né 日"
    names = dict(zip(token_ids, lists["tokens"], strict=True))
    halves = {token_id: name for token_id, name in names.items() if name.startswith("bytes:")}
    assert len(halves) >= 4, "the tokenizer cuts both characters"
    for token_id, name in halves.items():
        escaped = byte_level.token_bytes(token_id).decode("utf-8", "backslashreplace")
        assert name == f"bytes:{escaped}"
    first, *_, last = lists["text_offset"]
    assert (first, last) == (0, text.index("日")), (
        "all bytes of the last character begin where it does"
    )


def test_two_tokens_of_one_text_keep_their_values() -> None:
    class Twins(Tokenizer):
        """Four tokens: two are called A, one is half of a character."""

        def __init__(self) -> None:
            pass

        def token_bytes(self, token_id: int) -> bytes:
            return (b"A", b"A", b"\xe6", b"token_id:1")[token_id]

    names = TokenNames(Twins())
    assert names.distinct([1, 0]) == {1: "A", 0: "token_id:0"}
    assert names.distinct([0, 1, 0]) == {0: "A", 1: "token_id:1"}
    assert names.distinct([2, 1]) == {2: r"bytes:\xe6", 1: "A"}
    assert len(set(names.distinct([3, 0, 1]).values())) == 3


def test_a_chat_has_the_bytes_of_each_token(byte_level: Tokenizer) -> None:
    token_ids = tuple(byte_level.encode("日", add_special_tokens=False).tolist())
    answer = said(byte_level, token_ids)
    content = chat_logprobs(answer.log.chunks, TokenNames(byte_level), 3)
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "日"
    for entry in content:
        for each in (entry, *entry["top_logprobs"]):
            assert each["token"] == bytes(each["bytes"]).decode("utf-8", "backslashreplace")


@pytest.mark.parametrize("text", ["the ferry", "héllo 日本語", " waits", ""])
def test_an_echo_has_its_tokens_where_they_begin(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    echo = tokenizer.decode(token_ids)
    offsets = echoed_offsets(token_ids, tokenizer.detokenizer(), echo)
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(echo) for offset in offsets)
    for place, offset in enumerate(offsets):
        # The tokens from here on spell the rest, but for a character that is cut here.
        rest = tokenizer.decode(token_ids[place:])
        assert echo[offset:].endswith(rest.lstrip(" \N{REPLACEMENT CHARACTER}#"))
