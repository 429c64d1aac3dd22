"""InferenceService: prompts in, events out, and what is asked about requests and models."""

from __future__ import annotations

from dataclasses import asdict

from ferryman.errors import InvalidRequest
from ferryman.wire.codec.request import (
    logprobs_from_wire,
    logprobs_to_wire,
    usage_from_wire,
    usage_to_wire,
)
from ferryman.wire.codec.scalars import (
    finish_from_wire,
    finish_to_wire,
    token_ids_from_bytes,
    token_ids_to_bytes,
)
from ferryman.wire.public import (
    ChatPrompt,
    ChatTurn,
    GenerateEvent,
    GenerateFinished,
    GenerateStarted,
    LifecycleEvent,
    ModelCard,
    Prompt,
    RouteCandidate,
    RouteExplanation,
    TextPrompt,
    TokenChunk,
    TokenPrompt,
)
from ferryman.wire.v1 import inference_pb2


def prompt_to_wire(prompt: Prompt) -> inference_pb2.Prompt:
    match prompt:
        case TextPrompt(text):
            return inference_pb2.Prompt(text=text)
        case ChatPrompt(turns):
            messages = [
                inference_pb2.ChatMessage(role=turn.role, content=turn.content) for turn in turns
            ]
            return inference_pb2.Prompt(chat=inference_pb2.ChatPrompt(messages=messages))
        case TokenPrompt(token_ids):
            return inference_pb2.Prompt(token_ids=token_ids_to_bytes(token_ids))


def prompt_from_wire(message: inference_pb2.Prompt) -> Prompt:
    """InvalidRequest when nothing is in it; what is too short or long is the router's to say."""
    match message.WhichOneof("form"):
        case "text":
            return TextPrompt(message.text)
        case "chat":
            turns = (ChatTurn(turn.role, turn.content) for turn in message.chat.messages)
            return ChatPrompt(tuple(turns))
        case "token_ids":
            return TokenPrompt(token_ids_from_bytes(message.token_ids))
    raise InvalidRequest("a prompt is text, chat or token ids", "prompt")


def event_to_wire(event: GenerateEvent) -> inference_pb2.GenerateResponse:
    match event:
        case GenerateStarted():
            started = inference_pb2.GenerateStarted(**asdict(event))
            return inference_pb2.GenerateResponse(started=started)
        case TokenChunk():
            tokens = inference_pb2.TokenChunk(
                offset=event.offset,
                token_ids=token_ids_to_bytes(event.token_ids),
                text=event.text,
                logprobs=[logprobs_to_wire(each) for each in event.logprobs],
            )
            return inference_pb2.GenerateResponse(tokens=tokens)
        case GenerateFinished(reason, usage, text):
            finished = inference_pb2.GenerateFinished(
                finish_reason=finish_to_wire(reason), usage=usage_to_wire(usage), text=text
            )
            return inference_pb2.GenerateResponse(finished=finished)


def event_from_wire(message: inference_pb2.GenerateResponse) -> GenerateEvent:
    match message.WhichOneof("event"):
        case "started":
            start = message.started
            return GenerateStarted(start.request_id, start.model, start.prompt_tokens, start.seed)
        case "tokens":
            return _chunk_from_wire(message.tokens)
        case "finished":
            end = message.finished
            reason = finish_from_wire(end.finish_reason)
            return GenerateFinished(reason, usage_from_wire(end.usage), end.text)
    raise InvalidRequest("an event says nothing", "event")


def _chunk_from_wire(message: inference_pb2.TokenChunk) -> TokenChunk:
    return TokenChunk(
        offset=message.offset,
        token_ids=tuple(token_ids_from_bytes(message.token_ids).tolist()),
        text=message.text,
        logprobs=tuple(logprobs_from_wire(each) for each in message.logprobs),
    )


def explanation_to_wire(route: RouteExplanation) -> inference_pb2.RouteExplanation:
    return inference_pb2.RouteExplanation(
        attempt=route.attempt,
        chosen=_candidate_to_wire(route.chosen),
        others=[_candidate_to_wire(other) for other in route.others],
    )


def explanation_from_wire(message: inference_pb2.RouteExplanation) -> RouteExplanation:
    others = tuple(_candidate_from_wire(other) for other in message.others)
    return RouteExplanation(message.attempt, _candidate_from_wire(message.chosen), others)


def _candidate_to_wire(candidate: RouteCandidate) -> inference_pb2.RouteCandidate:
    return inference_pb2.RouteCandidate(**asdict(candidate))


def _candidate_from_wire(message: inference_pb2.RouteCandidate) -> RouteCandidate:
    return RouteCandidate(
        prefill_worker_id=message.prefill_worker_id,
        decode_worker_id=message.decode_worker_id,
        queue_seconds=message.queue_seconds,
        load_seconds=message.load_seconds,
        prefill_seconds=message.prefill_seconds,
        handoff_seconds=message.handoff_seconds,
        total_seconds=message.total_seconds,
        usable_tokens=message.usable_tokens,
        host_tokens=message.host_tokens,
        fetch_seconds=message.fetch_seconds,
        row_seconds=message.row_seconds,
        recompute_seconds=message.recompute_seconds,
        device_tokens=message.device_tokens,
        storage_tokens=message.storage_tokens,
        peer_tokens=message.peer_tokens,
        plane=message.plane,
    )


def lifecycle_to_wire(event: LifecycleEvent) -> inference_pb2.LifecycleEvent:
    return inference_pb2.LifecycleEvent(**asdict(event))


def lifecycle_from_wire(message: inference_pb2.LifecycleEvent) -> LifecycleEvent:
    return LifecycleEvent(
        message.role, message.worker_id, message.event, message.json, message.stream_sequence
    )


def model_to_wire(model: ModelCard) -> inference_pb2.Model:
    return inference_pb2.Model(**asdict(model))


def model_from_wire(message: inference_pb2.Model) -> ModelCard:
    return ModelCard(
        model_id=message.model_id,
        family=message.family,
        dtype=message.dtype,
        max_len=message.max_len,
        page_size=message.page_size,
        manifest_digest=message.manifest_digest,
        created_unix_seconds=message.created_unix_seconds,
        vocab=message.vocab,
    )
