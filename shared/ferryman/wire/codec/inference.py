"""InferenceService: prompts in, events out, and queries about requests and models."""

from __future__ import annotations

from ferryman.errors import InvalidRequest
from ferryman.schedule.prompt_scores import PromptScores
from ferryman.wire.codec.message_table import At, Codec, each, oneof, same, table
from ferryman.wire.codec.prefill import SCORES
from ferryman.wire.codec.request import (
    USAGE,
    checked_fork_points,
    logprobs_from_wire,
    logprobs_to_wire,
)
from ferryman.wire.codec.scalars import EXACTNESS, FINISH, token_ids_from_bytes, token_ids_to_bytes
from ferryman.wire.public import (
    ChatPrompt,
    ChatTurn,
    GenerateEvent,
    GenerateFinished,
    GenerateStarted,
    LifecycleEvent,
    LoadedState,
    ModelCard,
    Parting,
    Prompt,
    RouteCandidate,
    RouteExplanation,
    SignedState,
    TextPrompt,
    TokenChunk,
    TokenPrompt,
)
from ferryman.wire.v1 import inference_pb2


def prompt_to_wire(prompt: Prompt) -> inference_pb2.Prompt:
    match prompt:
        case TextPrompt(text, parse_special, omit_special):
            return inference_pb2.Prompt(
                text=text, parse_special=parse_special, omit_special=omit_special
            )
        case ChatPrompt(turns, parse_special, variables):
            messages = [
                inference_pb2.ChatMessage(role=turn.role, content=turn.content, more=turn.more)
                for turn in turns
            ]
            chat = inference_pb2.ChatPrompt(messages=messages, variables=variables)
            return inference_pb2.Prompt(chat=chat, parse_special=parse_special)
        case TokenPrompt(token_ids, fork_points):
            return inference_pb2.Prompt(
                token_ids=token_ids_to_bytes(token_ids), fork_points=fork_points
            )


def prompt_from_wire(message: inference_pb2.Prompt) -> Prompt:
    """Raises InvalidRequest for an empty message; the router checks the prompt's length."""
    match message.WhichOneof("form"):
        case "text":
            return TextPrompt(message.text, message.parse_special, message.omit_special)
        case "chat":
            turns = (ChatTurn(turn.role, turn.content, turn.more) for turn in message.chat.messages)
            return ChatPrompt(tuple(turns), message.parse_special, message.chat.variables)
        case "token_ids":
            return TokenPrompt(
                token_ids_from_bytes(message.token_ids), checked_fork_points(message.fork_points)
            )
    raise InvalidRequest("a prompt is text, chat or token ids", "prompt")


# By hand: one for each token of each stream.


def chunk_to_wire(chunk: TokenChunk) -> inference_pb2.TokenChunk:
    return inference_pb2.TokenChunk(
        offset=chunk.offset,
        token_ids=token_ids_to_bytes(chunk.token_ids),
        text=chunk.text,
        logprobs=[logprobs_to_wire(entry) for entry in chunk.logprobs],
    )


def chunk_from_wire(message: inference_pb2.TokenChunk) -> TokenChunk:
    return TokenChunk(
        offset=message.offset,
        token_ids=tuple(token_ids_from_bytes(message.token_ids).tolist()),
        text=message.text,
        logprobs=tuple(logprobs_from_wire(entry) for entry in message.logprobs),
    )


FINISHED = table(
    GenerateFinished,
    inference_pb2.GenerateFinished,
    reason=FINISH,
    usage=USAGE,
    exactness=EXACTNESS,
)
PARTING = table(Parting, inference_pb2.Parting)
STARTED = table(GenerateStarted, inference_pb2.GenerateStarted, parting=PARTING)
EVENT: Codec[GenerateEvent, inference_pb2.GenerateResponse] = oneof(
    inference_pb2.GenerateResponse,
    "event",
    "an event says nothing",
    started=(GenerateStarted, STARTED),
    prompt_scores=(PromptScores, SCORES),
    tokens=(TokenChunk, Codec(chunk_to_wire, chunk_from_wire)),
    finished=(GenerateFinished, FINISHED),
)
event_to_wire, event_from_wire = EVENT

CANDIDATE = table(RouteCandidate, inference_pb2.RouteCandidate, exactness=EXACTNESS)
explanation_to_wire, explanation_from_wire = table(
    RouteExplanation, inference_pb2.RouteExplanation, chosen=CANDIDATE, others=each(CANDIDATE)
)
lifecycle_to_wire, lifecycle_from_wire = table(LifecycleEvent, inference_pb2.LifecycleEvent)
model_to_wire, model_from_wire = table(
    ModelCard,
    inference_pb2.Model,
    exactness=EXACTNESS,
    arithmetics=At(same, tuple),
)
signed_state_to_wire, signed_state_from_wire = table(SignedState, inference_pb2.SignedState)
loaded_state_to_wire, loaded_state_from_wire = table(LoadedState, inference_pb2.StateArrival)
