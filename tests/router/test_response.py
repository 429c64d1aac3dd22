"""An answer is one text with its tokens and logprobs, however workers cut and repeat the tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.folders import write_folder

from ferryman.cache.manifest import Exactness
from ferryman.handoff.offsets import (
    Acceptance,
    Accepted,
    Diverged,
    Dropped,
    Lacking,
    TokenFrame,
    extend_hash,
)
from ferryman.schedule.request import FinishReason, SamplingParams
from ferryman.text.detokenizer import REPLACEMENT
from ferryman.text.located_prompt import LocatedPrompt
from ferryman.text.tokenizer import Tokenizer
from ferryman.wire.public import GenerateFinished
from ferryman.wire.values import RequestTokens, Usage
from ferryman_router.request.metrics import RouterMetrics
from ferryman_router.request.response import OutputLog, ResponseStream
from ferryman_router.routing.generate_request import (
    PUBLIC,
    Caller,
    GenerateRequest,
    RequestedSampling,
    TokenizedRequest,
)

TEXT = "the ferry waits; héllo 日本語 👍🏽 and waits"
KINDS = ("byte_level", "byte_fallback", "byte_window", "word_piece")


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    folder = tmp_path_factory.mktemp(str(request.param))
    return Tokenizer.load(write_folder(folder, str(request.param)))


def _logprobs_of(offset: int) -> Mapping[int, float]:
    """Different for every place, so that a shift by one is seen."""
    return {offset: -float(offset)}


@dataclass
class WorkerTokens:
    """The tokens that workers have for one answer, and the answer that takes them."""

    token_ids: tuple[int, ...]
    answer: ResponseStream
    attempt: int = 1

    def send(self, start: int, end: int, attempt: int | None = None) -> Acceptance:
        """One frame with the tokens of [start, end)."""
        running_hash = extend_hash(0, self.token_ids[:end])
        frame = TokenFrame(attempt or self.attempt, start, self.token_ids[start:end], running_hash)
        logprobs = tuple(_logprobs_of(offset) for offset in range(start, end))
        return self.answer.take(RequestTokens("request", frame, logprobs))

    def begin_attempt(self) -> None:
        self.attempt += 1
        self.answer.begin_attempt(self.attempt)

    def finished(self) -> Shown:
        reason = FinishReason.STOP if self.answer.has_stopped else FinishReason.LENGTH
        self.answer.finish(reason, Usage(1), Exactness.BITS)
        return _shown(self.answer.output_log)


@dataclass(frozen=True)
class Shown:
    """A reader's answer when it is over."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]


def _shown(output_log: OutputLog) -> Shown:
    assert isinstance(output_log.end, GenerateFinished)
    chunks, offset = output_log.chunks, 0
    for chunk in chunks:
        assert chunk.offset == offset
        offset += len(chunk.token_ids)
    return Shown(
        "".join(chunk.text for chunk in chunks) + output_log.end.text,
        tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        tuple(logprobs for chunk in chunks for logprobs in chunk.logprobs),
    )


def _worker_tokens(
    tokenizer: Tokenizer,
    token_ids: tuple[int, ...],
    *stop: str,
    metrics: RouterMetrics | None = None,
    clock: Callable[[], float] = lambda: 1.0,
) -> WorkerTokens:
    caller = Caller("request", PUBLIC, 10.0, "")
    params = SamplingParams(stop=stop, logprobs=1)
    prompt = LocatedPrompt(np.array([1], dtype="<u4"))
    sampling = RequestedSampling(params)
    request = GenerateRequest(caller, "", prompt, sampling, arrived=0.0)
    asked = TokenizedRequest(request, prompt, params, frozenset())
    answer = ResponseStream(asked, tokenizer, metrics or RouterMetrics(), clock)
    answer.begin_attempt(1)
    return WorkerTokens(token_ids, answer)


def _encoded(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False).tolist())


def _expected(tokenizer: Tokenizer, token_ids: tuple[int, ...], stop: tuple[str, ...]) -> Shown:
    """From whole texts: the text before the earliest stop, the fewest tokens that contain it."""

    def ends(text: str) -> list[tuple[int, int]]:
        found = ((text.find(one), one) for one in stop)
        return [(at + len(one), at) for at, one in found if at >= 0]

    whole, num_tokens = tokenizer.decode(token_ids), len(token_ids)
    if stops := ends(whole):
        num_tokens = next(
            n for n in range(len(token_ids) + 1) if ends(tokenizer.decode(token_ids[:n]))
        )
        whole = whole[: min(stops)[1]]
    return Shown(whole, token_ids[:num_tokens], tuple(map(_logprobs_of, range(num_tokens))))


@pytest.mark.parametrize("size", [2, 3, 5, 9, 12, 100])
def test_frames_of_any_size_give_one_text(tokenizer: Tokenizer, size: int) -> None:
    token_ids = _encoded(tokenizer, TEXT)
    for num_tokens in range(1, len(token_ids) + 1):
        said = token_ids[:num_tokens]
        answer = _in_frames_of(size, tokenizer, said)
        assert answer == _in_frames_of(1, tokenizer, said)
        # The library decodes some texts that end inside a character otherwise than they began.
        if REPLACEMENT not in tokenizer.decode(said):
            assert answer == _expected(tokenizer, said, ())


def _in_frames_of(size: int, tokenizer: Tokenizer, token_ids: tuple[int, ...]) -> Shown:
    worker = _worker_tokens(tokenizer, token_ids)
    for start in range(0, len(token_ids), size):
        worker.send(start, min(start + size, len(token_ids)))
    return worker.finished()


WORDS = ("ab", "ba", " the", "é", "日", "👍🏽", "x")


@given(data=st.data())
def test_any_cut_with_repetitions_and_stops_gives_one_answer(
    byte_level: Tokenizer, data: st.DataObject
) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(WORDS), max_size=20), label="words"))
    num_lacking = data.draw(st.integers(0, 3), label="tokens that never come")
    token_ids = _encoded(byte_level, text)
    token_ids = token_ids[: max(0, len(token_ids) - num_lacking)]
    stop = tuple(data.draw(st.lists(_parts_of(text + "ab"), max_size=3), label="stop"))
    worker = _worker_tokens(byte_level, token_ids, *stop)
    while worker.answer.next_offset < len(token_ids) and not worker.answer.has_stopped:
        _send_some_frame(worker, data)
    assert worker.finished() == _expected(byte_level, token_ids, stop)


def _parts_of(text: str) -> st.SearchStrategy[str]:
    places = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 5))
    return places.map(lambda place: text[place[0] : place[0] + place[1]])


def _send_some_frame(worker: WorkerTokens, data: st.DataObject) -> None:
    """A frame that goes on, with up to six tokens again; or one that must change nothing."""
    reached, num_tokens = worker.answer.next_offset, len(worker.token_ids)
    match data.draw(st.sampled_from(["next", "next", "stale", "early", "attempt"])):
        case "stale":
            assert worker.send(reached, num_tokens, worker.attempt + 1) == Dropped(is_stale=True)
        case "early" if reached + 1 < num_tokens:
            early = worker.send(reached + 1, num_tokens)
            assert early == Lacking(reached, reached + 1)
        case "attempt":
            worker.begin_attempt()
        case _:
            start = reached - data.draw(st.integers(0, min(reached, 6)), label="again")
            end = data.draw(st.integers(start + 1, min(num_tokens, start + 14)), label="end")
            fresh = worker.token_ids[reached:end]
            expected = Accepted(reached, fresh) if fresh else Dropped(is_stale=False)
            assert worker.send(start, end) == expected


def test_a_repeated_frame_with_one_new_token_brings_that_tokens_logprobs(
    byte_level: Tokenizer,
) -> None:
    worker = _worker_tokens(byte_level, _encoded(byte_level, "ab ba ab ba"))
    worker.send(0, 3)
    assert worker.send(0, 4) == Accepted(3, worker.token_ids[3:4])
    assert worker.answer.output_log.chunks[-1].logprobs == (_logprobs_of(3),)


def test_half_a_stop_string_at_the_end_is_text(byte_level: Tokenizer) -> None:
    token_ids = _encoded(byte_level, "the ferry x")
    worker = _worker_tokens(byte_level, token_ids, "xyz")
    worker.send(0, len(token_ids))
    assert "".join(chunk.text for chunk in worker.answer.output_log.chunks) == "the ferry "
    assert worker.finished().text == "the ferry x"


def test_no_token_behind_a_stop_is_shown_whatever_comes_after(byte_level: Tokenizer) -> None:
    token_ids = _encoded(byte_level, "ab xyz ab")
    worker = _worker_tokens(byte_level, token_ids, "xyz")
    worker.send(0, len(token_ids) - 1)
    worker.send(len(token_ids) - 1, len(token_ids))  # was under way when the stop was found
    assert worker.answer.has_stopped
    assert worker.finished() == _expected(byte_level, token_ids, ("xyz",))


def test_a_stop_string_of_the_last_held_back_character_ends_the_answer(
    byte_level: Tokenizer,
) -> None:
    half = _encoded(byte_level, "👍")[:1]
    worker = _worker_tokens(byte_level, half, REPLACEMENT)
    worker.send(0, 1)
    worker.answer.finish(FinishReason.LENGTH, Usage(1), Exactness.BITS)
    end = GenerateFinished(FinishReason.STOP, Usage(1), "", REPLACEMENT, Exactness.BITS)
    assert worker.answer.output_log.end == end


def test_the_times_of_tokens_add_up_to_that_of_the_answer(byte_level: Tokenizer) -> None:
    """Tokens that come together share the time before them."""
    times, metrics = iter((2.0, 2.75, 3.0)), RouterMetrics()
    worker = _worker_tokens(
        byte_level, _encoded(byte_level, TEXT)[:5], metrics=metrics, clock=lambda: next(times)
    )
    for start, end in ((0, 1), (1, 4), (4, 5)):
        worker.send(start, end)
    assert (metrics.first_token._sum, sum(metrics.first_token._counts)) == (2.0, 1)
    assert (metrics.gap._sum, sum(metrics.gap._counts)) == (1.0, 4)


def test_an_answer_that_diverges_is_left_as_it_was(byte_level: Tokenizer) -> None:
    token_ids = _encoded(byte_level, "ab ba ab")
    worker = _worker_tokens(byte_level, token_ids)
    worker.send(0, 2)
    before = list(worker.answer.output_log.chunks)
    other = WorkerTokens((token_ids[0] + 1, *token_ids[1:]), worker.answer)
    assert other.send(0, len(token_ids)) == Diverged(0)
    assert other.send(2, len(token_ids)) == Diverged(2)
    assert worker.answer.output_log.chunks == before
    worker.send(2, len(token_ids))
    assert worker.finished() == _expected(byte_level, token_ids, ())
