"""Common parts of messages about a request: sampling, context, usage, drawn tokens, failures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ferryman.cache.keys import TokenIds
from ferryman.errors import InvalidRequest
from ferryman.handoff.usage import CachedTokens
from ferryman.ids import check_request_id
from ferryman.schedule.batch import Sampled
from ferryman.schedule.output_grammar import GrammarKind, OutputGrammar
from ferryman.schedule.request import (
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    Pin,
    Request,
    SamplingParams,
)
from ferryman.schedule.token_rules import (
    MAX_ALLOWED,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_WORD_TOKENS,
    TokenRules,
)
from ferryman.wire.codec.message_table import At, Codec, Within, each, same, table, within
from ferryman.wire.codec.scalars import (
    bounded_seconds,
    keys_from_bytes,
    keys_to_bytes,
    milliseconds,
    numbers_of,
    seconds,
    token_ids_from_bytes,
    token_ids_to_bytes,
)
from ferryman.wire.v1 import decode_pb2, prefill_pb2, types_pb2
from ferryman.wire.values import (
    AttemptSignature,
    Failure,
    RequestContext,
    UncachedPages,
    Usage,
    WorkerAddress,
)

MAX_SALT_BYTES = 64
MAX_SIBLINGS = 1024
MAX_FORK_POINTS = 64
# The caller's own and the model's.
MAX_END_TOKEN_IDS = 2 * MAX_STOP_TOKEN_IDS
MAX_PINS, MAX_PIN_SECONDS = 32, 43_200
DEFAULT_SAMPLING = SamplingParams()
_MAX_RULES = {
    "biased_token_ids": MAX_BIASES,
    "biases": MAX_BIASES,
    "allowed_token_ids": MAX_ALLOWED,
    "bad_words": MAX_BAD_WORDS,
}
_DIGEST = re.compile(r"[0-9a-f]{32}")
_HOST_AND_PORT = re.compile(r"[^\s/]+:\d{1,5}")

_SCALARS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "logprobs",
    "ignore_eos",
)


_GRAMMAR_KINDS = numbers_of(GrammarKind, types_pb2.GrammarKind, "GRAMMAR_KIND")
_GRAMMAR_KINDS_BACK = {number: kind for kind, number in _GRAMMAR_KINDS.items()}


def _grammar_kind(number: int) -> GrammarKind:
    kind = _GRAMMAR_KINDS_BACK.get(number)
    if kind is None:
        raise InvalidRequest(f"there is no grammar kind {number}", "grammar")
    return kind


GRAMMAR = table(
    OutputGrammar,
    types_pb2.OutputGrammar,
    kind=At(_GRAMMAR_KINDS.__getitem__, _grammar_kind),
)


def rules_to_wire(rules: TokenRules) -> types_pb2.TokenRules | None:
    """None for no rules."""
    if rules.are_none:
        return None
    return types_pb2.TokenRules(
        min_tokens=rules.min_tokens,
        biased_token_ids=[token_id for token_id, _ in rules.logit_bias],
        biases=[bias for _, bias in rules.logit_bias],
        allowed_token_ids=rules.allowed_token_ids,
        bad_words=[types_pb2.TokenSequence(token_ids=word) for word in rules.bad_words],
    )


def rules_from_wire(message: types_pb2.TokenRules) -> TokenRules:
    """Raises InvalidRequest for too many, before they are copied, and for meaningless ones."""
    for name, most in _MAX_RULES.items():
        if len(getattr(message, name)) > most:
            raise InvalidRequest(f"{name} has at most {most} entries", name)
    if len(message.biases) != len(message.biased_token_ids):
        raise InvalidRequest("biases has one number per token id", "biases")
    if any(len(word.token_ids) > MAX_WORD_TOKENS for word in message.bad_words):
        raise InvalidRequest(f"a bad word has at most {MAX_WORD_TOKENS} tokens", "bad_words")
    return TokenRules(
        message.min_tokens,
        tuple(zip(message.biased_token_ids, message.biases, strict=True)),
        tuple(message.allowed_token_ids),
        tuple(tuple(word.token_ids) for word in message.bad_words),
    )


def sampling_to_wire(params: SamplingParams) -> types_pb2.SamplingParams:
    """Every field is set, so that the receiver's defaults do not matter; `prompt_logprobs` is set
    if they are asked for."""
    scalars: dict[str, Any] = {name: getattr(params, name) for name in _SCALARS}
    if params.prompt_logprobs is not None:
        scalars["prompt_logprobs"] = params.prompt_logprobs
    grammar = None if params.grammar is None else GRAMMAR.to_wire(params.grammar)
    return types_pb2.SamplingParams(
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        grammar=grammar,
        rules=rules_to_wire(params.rules),
        **scalars,
    )


def sampling_from_wire(
    message: types_pb2.SamplingParams, defaults: SamplingParams = DEFAULT_SAMPLING
) -> SamplingParams:
    """Absent fields are taken from `defaults`; InvalidRequest for values out of range."""
    present: dict[str, Any] = {
        name: getattr(message, name)
        for name in (*_SCALARS, "prompt_logprobs")
        if message.HasField(name)
    }
    _check_stops(message)
    stop = tuple(message.stop) or defaults.stop
    stop_token_ids = tuple(message.stop_token_ids) or defaults.stop_token_ids
    if message.HasField("grammar"):
        present["grammar"] = GRAMMAR.from_wire(message.grammar)
    if message.HasField("rules"):
        present["rules"] = rules_from_wire(message.rules)
    return replace(defaults, stop=stop, stop_token_ids=stop_token_ids, **present)


def _check_stops(message: types_pb2.SamplingParams) -> None:
    """Checks the numbers of entries before a message of the largest size is copied."""
    for name, num_allowed in (("stop", MAX_STOP_STRINGS), ("stop_token_ids", MAX_STOP_TOKEN_IDS)):
        if len(getattr(message, name)) > num_allowed:
            raise InvalidRequest(f"{name} has at most {num_allowed} entries", name)


def _check_salt(salt: bytes) -> bytes:
    if len(salt) > MAX_SALT_BYTES:
        raise InvalidRequest(f"a tenant salt has at most {MAX_SALT_BYTES} bytes", "tenant_salt")
    return salt


def _check_adapter(digest: str) -> str:
    if digest and not _DIGEST.fullmatch(digest):
        raise InvalidRequest("an adapter is named by 32 hex digits", "adapter")
    return digest


def _duration(name: str) -> At:
    return At(milliseconds, lambda ms: bounded_seconds(ms, name), name)


CONTEXT = table(
    RequestContext,
    types_pb2.RequestContext,
    tenant_salt=At(same, _check_salt),
    adapter=At(same, _check_adapter),
    request_id=At(same, check_request_id),
    deadline_seconds=_duration("deadline_ms"),
    age_seconds=_duration("age_ms"),
)
context_to_wire, context_from_wire = CONTEXT
ADDRESS = table(WorkerAddress, types_pb2.WorkerAddress)
address_to_wire, address_from_wire = ADDRESS
SIGNATURE = table(AttemptSignature, types_pb2.AttemptSignature)


def reachable_from_wire(message: types_pb2.WorkerAddress, field: str) -> WorkerAddress:
    """The address of a worker to be called; InvalidRequest unless it is host:port."""
    if not _HOST_AND_PORT.fullmatch(message.address):
        name = f"{field}.address"
        raise InvalidRequest(f"{name} is {message.address[:80]!r}, and not host:port", name)
    return address_from_wire(message)


def _checked_usage(message: types_pb2.Usage) -> Usage:
    usage = _USAGE.from_wire(message)
    if usage.cached.total > usage.prompt_tokens:
        raise InvalidRequest("more tokens are cached than the prompt has", "usage")
    if usage.at_decode.total > usage.prompt_tokens:
        raise InvalidRequest("decode had more tokens than the prompt has", "usage")
    return usage


_USAGE = table(
    Usage,
    types_pb2.Usage,
    cached=within(
        CachedTokens,
        device="cached_device_tokens",
        host="cached_host_tokens",
        storage="cached_storage_tokens",
        peer="cached_peer_tokens",
    ),
    at_decode=within(
        CachedTokens,
        device="decode_device_tokens",
        host="decode_host_tokens",
        storage="decode_storage_tokens",
        peer="decode_peer_tokens",
    ),
    uncached=each(table(UncachedPages, types_pb2.UncachedReason), "uncached_reasons"),
)
USAGE = Codec(_USAGE.to_wire, _checked_usage)
usage_to_wire, usage_from_wire = USAGE


def logprobs_to_wire(logprobs: Mapping[int, float]) -> types_pb2.LogProbs:
    return types_pb2.LogProbs(token_ids=logprobs.keys(), logprobs=logprobs.values())


def logprobs_from_wire(message: types_pb2.LogProbs) -> dict[int, float]:
    if len(message.token_ids) != len(message.logprobs):
        raise InvalidRequest("logprobs has one number per token id", "logprobs")
    return dict(zip(message.token_ids, message.logprobs, strict=True))


LOGPROBS = Codec(logprobs_to_wire, logprobs_from_wire)
SAMPLED = table(Sampled, types_pb2.Sampled, logprobs=LOGPROBS)
sampled_to_wire, sampled_from_wire = SAMPLED
FAILURE = table(
    Failure, types_pb2.Failure, retry_after_seconds=At(milliseconds, seconds, "retry_after_ms")
)
failure_to_wire, failure_from_wire = FAILURE


OrderMessage = prefill_pb2.PrefillRequest | decode_pb2.ReserveRequest


def request_to_fields(request: Request) -> dict[str, Any]:
    """The fields in which orders to prefill and to decode carry the request itself."""
    return {
        "token_ids": token_ids_to_bytes(request.token_ids),
        "page_keys": keys_to_bytes(request.keys),
        "num_generated": request.num_generated,
        "num_siblings": request.num_siblings,
        "sampling": sampling_to_wire(request.sampling),
        "stop_token_ids": sorted(request.stop_token_ids),
        "fork_points": request.fork_points,
        "pins": [types_pb2.Pin(**pin._asdict()) for pin in request.pins],
    }


def request_from_fields(message: OrderMessage) -> Request:
    token_ids = token_ids_from_bytes(message.token_ids)
    _check_tokens(token_ids, message.num_generated)
    if message.num_siblings > MAX_SIBLINGS:
        raise InvalidRequest(f"at most {MAX_SIBLINGS} requests share a prompt", "num_siblings")
    if len(message.stop_token_ids) > MAX_END_TOKEN_IDS:
        raise InvalidRequest(
            f"at most {MAX_END_TOKEN_IDS} token ids end a request", "stop_token_ids"
        )
    return Request(
        request_id=check_request_id(message.context.request_id),
        token_ids=token_ids,
        keys=keys_from_bytes(message.page_keys),
        sampling=sampling_from_wire(message.sampling),
        stop_token_ids=frozenset(message.stop_token_ids),
        num_generated=message.num_generated,
        num_siblings=message.num_siblings,
        fork_points=checked_fork_points(message.fork_points),
        pins=_checked_pins(message.pins),
    )


def _checked_pins(messages: Sequence[types_pb2.Pin]) -> tuple[Pin, ...]:
    if len(messages) > MAX_PINS:
        raise InvalidRequest(f"a prompt has at most {MAX_PINS} pins", "pins")
    return tuple(Pin(pin.position, min(pin.seconds, MAX_PIN_SECONDS)) for pin in messages)


def checked_fork_points(positions: Sequence[int]) -> tuple[int, ...]:
    """Positions at which prompts part. One that is no position of the prompt has no effect."""
    if len(positions) > MAX_FORK_POINTS:
        raise InvalidRequest(f"a prompt has at most {MAX_FORK_POINTS} fork points", "fork_points")
    return tuple(positions)


def _check_tokens(token_ids: TokenIds, num_generated: int) -> None:
    if len(token_ids) == 0:
        raise InvalidRequest("the prompt is empty", "token_ids")
    if num_generated >= len(token_ids):
        raise InvalidRequest("a prompt comes before what was generated", "num_generated")


# The request id is in the context.
REQUEST = Within(
    (
        "token_ids",
        "page_keys",
        "num_generated",
        "num_siblings",
        "sampling",
        "stop_token_ids",
        "fork_points",
        "pins",
    ),
    request_to_fields,
    request_from_fields,
)
