"""Every domain value comes back from its message as it went in, through the bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from tests.wire import strategies as draw

from ferryman.cache.manifest import Kind
from ferryman.cache.resume import Reason
from ferryman.errors import Cancelled, InvalidRequest
from ferryman.handoff.effects import WriteFence
from ferryman.handoff.values import WantedUnit
from ferryman.schedule.prompt_scores import PromptScores
from ferryman.schedule.request import FinishReason, Request, SamplingParams
from ferryman.tiers.prefetch_values import Prefetched, PrefetchPolicy, PrefetchShortfall
from ferryman.wire import public, values
from ferryman.wire.codec import (
    caches,
    handoff,
    inference,
    pieces,
    prefill,
    request,
    scalars,
    tokens,
)
from ferryman.wire.codec.prefill import scores_from_wire
from ferryman.wire.v1 import decode_pb2, inference_pb2, prefill_pb2, types_pb2

M = TypeVar("M", bound=Message)


def over_the_wire(message: M) -> M:
    return type(message).FromString(message.SerializeToString())


def comparable(order: Any) -> tuple[Any, ...]:
    """Arrays have no single equality: token ids as a list, everything else as it is."""
    request: Request = order.request
    bare = replace(request, token_ids=np.zeros(0, dtype="<u4"))
    facts = [getattr(bare, name) for name in Request.__slots__ if name != "token_ids"]
    rest = [getattr(order, name) for name in type(order).__slots__ if name != "request"]
    return request.token_ids.tolist(), facts, rest


@given(draw.sampling())
def test_sampling_comes_back(params: SamplingParams) -> None:
    assert request.sampling_from_wire(over_the_wire(request.sampling_to_wire(params))) == params


@given(draw.sampling())
def test_absent_sampling_fields_are_the_receivers_choice(defaults: SamplingParams) -> None:
    message = types_pb2.SamplingParams(max_tokens=3)
    assert request.sampling_from_wire(message, defaults) == replace(defaults, max_tokens=3)


def test_sampling_that_means_nothing_is_refused_by_name() -> None:
    message = types_pb2.SamplingParams(temperature=float("nan"))
    with pytest.raises(InvalidRequest) as caught:
        request.sampling_from_wire(message)
    assert caught.value.param == "temperature"


@given(draw.contexts())
def test_a_context_comes_back(context: values.RequestContext) -> None:
    message = over_the_wire(request.context_to_wire(context))
    assert request.context_from_wire(message) == context


@given(draw.usages)
def test_usage_comes_back(usage: values.Usage) -> None:
    assert request.usage_from_wire(over_the_wire(request.usage_to_wire(usage))) == usage


def test_usage_with_more_cached_than_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="more tokens are cached"):
        request.usage_from_wire(types_pb2.Usage(prompt_tokens=3, cached_host_tokens=4))


@given(draw.sampled)
def test_a_drawn_token_comes_back(sampled: Any) -> None:
    assert request.sampled_from_wire(over_the_wire(request.sampled_to_wire(sampled))) == sampled


@given(draw.failures)
def test_a_failure_comes_back(failure: values.Failure) -> None:
    assert request.failure_from_wire(over_the_wire(request.failure_to_wire(failure))) == failure


@given(draw.prefill_orders())
def test_a_prefill_order_comes_back(order: values.PrefillOrder) -> None:
    message = over_the_wire(prefill.prefill_order_to_wire(order))
    assert comparable(prefill.prefill_order_from_wire(message)) == comparable(order)


@given(draw.progress())
def test_progress_comes_back(progress: values.PrefillProgress) -> None:
    message = over_the_wire(prefill.progress_to_wire(progress))
    assert prefill.progress_from_wire(message) == progress


@given(draw.reserve_orders())
def test_a_reserve_order_comes_back(order: values.ReserveOrder) -> None:
    message = over_the_wire(handoff.reserve_order_to_wire(order))
    assert comparable(handoff.reserve_order_from_wire(message)) == comparable(order)


@given(draw.reserve_answers())
def test_a_reservation_comes_back(answer: handoff.ReserveAnswer) -> None:
    message = over_the_wire(handoff.reserve_answer_to_wire(answer))
    attempt = answer.reservation.attempt
    assert handoff.reserve_answer_from_wire(message, attempt) == answer


@given(draw.commit_orders())
def test_a_commit_comes_back(order: values.CommitOrder) -> None:
    message = over_the_wire(handoff.commit_order_to_wire(order))
    assert handoff.commit_order_from_wire(message) == order


@given(draw.stop_orders(), draw.stop_answers())
def test_a_stop_and_its_answer_come_back(
    order: values.StopOrder, answer: values.StopAnswer
) -> None:
    message = over_the_wire(prefill.stop_order_to_wire(order))
    assert prefill.stop_order_from_wire(message) == order
    said = over_the_wire(prefill.stop_answer_to_wire(answer))
    assert prefill.stop_answer_from_wire(said) == answer


@given(draw.abort_orders())
def test_an_abort_comes_back(order: values.AbortOrder) -> None:
    message = over_the_wire(handoff.abort_order_to_wire(order))
    assert handoff.abort_order_from_wire(message) == order


@given(draw.epochs, draw.epochs, st.lists(draw.request_tokens(), max_size=3))
def test_a_step_frame_comes_back(
    epoch: int, sequence: int, requests: list[values.RequestTokens]
) -> None:
    entries = map(tokens.request_tokens_to_wire, requests)
    frame = decode_pb2.TokensResponse(epoch=epoch, sequence=sequence, requests=entries)
    read = over_the_wire(frame)
    assert (read.epoch, read.sequence) == (epoch, sequence)
    assert [tokens.request_tokens_from_wire(entry) for entry in read.requests] == requests


def test_a_cut_answer_has_no_finish_reason() -> None:
    finished = inference_pb2.GenerateFinished(finish_reason=types_pb2.FINISH_REASON_CANCELLED)
    with pytest.raises(Cancelled):
        inference.event_from_wire(inference_pb2.GenerateResponse(finished=finished))
    with pytest.raises(Cancelled):
        public.GenerateFinished(FinishReason.CANCELLED, values.Usage(1))


@given(draw.request_ids, draw.counts, draw.counts)
def test_a_cursor_comes_back(request_id: str, attempt: int, offset: int) -> None:
    cursor = values.TokenCursor(request_id, attempt, offset)
    assert tokens.cursor_from_wire(over_the_wire(tokens.cursor_to_wire(cursor))) == cursor


@given(draw.kinds, draw.counts, draw.epochs, draw.epochs, draw.keys)
def test_a_piece_of_a_unit_comes_back(
    kind: Kind, index: int, generation: int, offset: int, content: bytes
) -> None:
    piece = pieces.Piece(WantedUnit(kind, index, generation), offset, content)
    assert pieces.piece_from_wire(over_the_wire(pieces.piece_to_wire(piece))) == piece


@given(draw.texts, draw.epochs, draw.counts, draw.texts, draw.texts)
def test_the_header_of_a_write_comes_back(
    reservation_id: str, epoch: int, attempt: int, request_id: str, digest: str
) -> None:
    fence = WriteFence(epoch, reservation_id, attempt)
    header = pieces.WriteHeader(fence, request_id, digest)
    assert pieces.header_from_wire(over_the_wire(pieces.header_to_wire(header))) == header


@given(draw.host_units)
def test_a_host_unit_comes_back(unit: Any) -> None:
    assert caches.host_unit_from_wire(over_the_wire(caches.host_unit_to_wire(unit))) == unit


def test_a_reason_that_no_plan_could_name_is_none() -> None:
    message = caches.prefetched_to_wire(Prefetched(asked_pages=8))
    message.reason = "moon_phase"
    assert caches.prefetched_from_wire(message).reason == ""
    assert {str(reason) for reason in PrefetchShortfall} <= {str(reason) for reason in Reason}


@given(draw.prefetched)
def test_what_a_prefetch_brought_comes_back(brought: Prefetched) -> None:
    message = over_the_wire(caches.prefetched_to_wire(brought))
    assert caches.prefetched_from_wire(message) == brought


@given(st.sampled_from(PrefetchPolicy))
def test_a_prefetch_policy_comes_back(policy: PrefetchPolicy) -> None:
    for otherwise in PrefetchPolicy:
        assert caches.policy_from_wire(caches.policy_to_wire(policy), otherwise) is policy
        assert caches.policy_from_wire(0, otherwise) is otherwise


@given(draw.cache_events())
def test_a_cache_event_comes_back(event: caches.CacheEvent) -> None:
    assert caches.cache_event_from_bytes(caches.cache_event_to_bytes(event)) == event


@given(draw.cache_snapshots())
def test_a_cache_snapshot_comes_back(snapshot: caches.CacheSnapshot) -> None:
    assert caches.cache_snapshot_from_bytes(caches.cache_snapshot_to_bytes(snapshot)) == snapshot


@given(draw.prompts())
def test_a_prompt_comes_back(prompt: public.Prompt) -> None:
    assert inference.prompt_from_wire(over_the_wire(inference.prompt_to_wire(prompt))) == prompt


@given(draw.token_lists)
def test_a_prompt_of_token_ids_comes_back(token_ids: list[int]) -> None:
    prompt = public.TokenPrompt(np.array(token_ids, dtype="<u4"))
    back = inference.prompt_from_wire(over_the_wire(inference.prompt_to_wire(prompt)))
    assert isinstance(back, public.TokenPrompt)
    assert back.token_ids.tolist() == token_ids


@given(draw.generate_events())
def test_a_generate_event_comes_back(event: public.GenerateEvent) -> None:
    assert inference.event_from_wire(over_the_wire(inference.event_to_wire(event))) == event


@given(draw.prompt_scores())
def test_scores_come_back_on_both_streams(scores: PromptScores) -> None:
    on_prefills = prefill.progress_from_wire(over_the_wire(prefill.progress_to_wire(scores)))
    on_clients = inference.event_from_wire(over_the_wire(inference.event_to_wire(scores)))
    for back in (on_prefills, on_clients):
        assert isinstance(back, PromptScores)
        assert back.first == scores.first
        assert list(back.positions()) == list(scores.positions())


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"first": 0},
        {"token_ids": b"\0" * 12},
        {"token_ids": b"\0" * 7},
        {"logprobs": np.array([np.nan, 0.0]).tobytes()},
        {"ranks": b""},
        {"token_ids": b"\0" * 4 * 16_385, "logprobs": b"\0" * 8 * 16_385},
    ],
    ids=["nothing", "the first token", "3 for 2", "torn", "no number", "no token", "too much"],
)
def test_scores_without_a_meaning_are_refused(wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {
        "first": 1,
        "token_ids": b"\0" * 8,
        "logprobs": b"\0" * 16,
        "ranks": b"\0" * 4,
    }
    assert scores_from_wire(types_pb2.PromptScores(**right)).num_best == 1
    message = types_pb2.PromptScores(**({**right, **wrong} if wrong else {}))
    with pytest.raises(InvalidRequest) as refused:
        scores_from_wire(message)
    assert refused.value.param == "prompt_scores"


@given(draw.explanations())
def test_an_explanation_comes_back(route: public.RouteExplanation) -> None:
    message = over_the_wire(inference.explanation_to_wire(route))
    assert inference.explanation_from_wire(message) == route


@given(draw.texts, draw.texts, draw.texts, draw.texts, draw.epochs)
def test_a_lifecycle_entry_comes_back(
    role: str, worker: str, event: str, json: str, sequence: int
) -> None:
    entry = public.LifecycleEvent(role, worker, event, json, sequence)
    assert inference.lifecycle_from_wire(over_the_wire(inference.lifecycle_to_wire(entry))) == entry


def test_a_model_card_comes_back() -> None:
    card = public.ModelCard("demo", "GraniteMoeHybrid", "float32", 4096, 64, "ab", 17, 512)
    assert inference.model_from_wire(over_the_wire(inference.model_to_wire(card))) == card


@given(st.integers(0, 10**12))
def test_a_duration_is_never_shortened(ms: int) -> None:
    assert scalars.milliseconds(scalars.seconds(ms)) == ms
    assert scalars.milliseconds(0.0001) == 1
    assert scalars.milliseconds(-3.0) == 0


def test_malformed_bytes_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="4 for each token"):
        scalars.token_ids_from_bytes(b"12345")
    with pytest.raises(InvalidRequest, match="page keys have 16 bytes"):
        scalars.keys_from_bytes(b"short")
    for num_bytes in (0, 15, 17, 32):
        with pytest.raises(InvalidRequest, match="a page key has 16 bytes"):
            scalars.key_from_bytes(bytes(num_bytes))
        with pytest.raises(InvalidRequest, match="digest has 16 bytes"):
            scalars.digest_from_bytes(bytes(num_bytes))
    with pytest.raises(InvalidRequest, match="no state kind 0"):
        scalars.kind_from_wire(0)
    with pytest.raises(InvalidRequest, match="no CacheEvent"):
        caches.cache_event_from_bytes(b"\xff\xff")


def test_an_empty_prompt_is_refused() -> None:
    context = types_pb2.RequestContext(request_id="r")
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        prefill.prefill_order_from_wire(prefill_pb2.PrefillRequest(context=context))


def test_a_commit_without_a_token_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="first token"):
        handoff.commit_order_from_wire(decode_pb2.CommitRequest())


def test_a_bad_request_id_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="request id"):
        request.context_from_wire(types_pb2.RequestContext(request_id="a.b"))
