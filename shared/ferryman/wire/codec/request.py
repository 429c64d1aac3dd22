"""What is said of a request everywhere: sampling, context, usage, tokens drawn, failures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ferryman.cache.keys import TokenIds
from ferryman.errors import InvalidRequest
from ferryman.handoff.usage import CachedTokens
from ferryman.ids import check_request_id
from ferryman.schedule.batch import Sampled
from ferryman.schedule.request import Request, SamplingParams
from ferryman.wire.codec.scalars import (
    keys_from_bytes,
    keys_to_bytes,
    milliseconds,
    seconds,
    token_ids_from_bytes,
    token_ids_to_bytes,
)
from ferryman.wire.v1 import decode_pb2, prefill_pb2, types_pb2
from ferryman.wire.values import Failure, RequestContext, UncachedPages, Usage, WorkerAddress

MAX_SALT_BYTES = 64
DEFAULT_SAMPLING = SamplingParams()

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


def sampling_to_wire(params: SamplingParams) -> types_pb2.SamplingParams:
    """Every field is set, so that the receiver's defaults do not matter."""
    scalars: dict[str, Any] = {name: getattr(params, name) for name in _SCALARS}
    return types_pb2.SamplingParams(
        stop=params.stop, stop_token_ids=params.stop_token_ids, **scalars
    )


def sampling_from_wire(
    message: types_pb2.SamplingParams, defaults: SamplingParams = DEFAULT_SAMPLING
) -> SamplingParams:
    """Absent fields are taken from `defaults`; InvalidRequest for values that mean nothing."""
    given: dict[str, Any] = {
        name: getattr(message, name) for name in _SCALARS if message.HasField(name)
    }
    stop = tuple(message.stop) or defaults.stop
    stop_token_ids = tuple(message.stop_token_ids) or defaults.stop_token_ids
    return replace(defaults, stop=stop, stop_token_ids=stop_token_ids, **given)


def context_to_wire(context: RequestContext) -> types_pb2.RequestContext:
    return types_pb2.RequestContext(
        request_id=context.request_id,
        attempt=context.attempt,
        deadline_ms=milliseconds(context.deadline_seconds),
        age_ms=milliseconds(context.age_seconds),
        traceparent=context.traceparent,
        tenant_salt=context.tenant_salt,
    )


def context_from_wire(message: types_pb2.RequestContext) -> RequestContext:
    if len(message.tenant_salt) > MAX_SALT_BYTES:
        raise InvalidRequest(f"a tenant salt has at most {MAX_SALT_BYTES} bytes", "tenant_salt")
    return RequestContext(
        request_id=check_request_id(message.request_id),
        attempt=message.attempt,
        deadline_seconds=seconds(message.deadline_ms),
        age_seconds=seconds(message.age_ms),
        traceparent=message.traceparent,
        tenant_salt=message.tenant_salt,
    )


def address_to_wire(worker: WorkerAddress) -> types_pb2.WorkerAddress:
    return types_pb2.WorkerAddress(
        worker_id=worker.worker_id, address=worker.address, epoch=worker.epoch
    )


def address_from_wire(message: types_pb2.WorkerAddress) -> WorkerAddress:
    return WorkerAddress(message.worker_id, message.address, message.epoch)


def uncached_to_wire(pages: Iterable[UncachedPages]) -> list[types_pb2.UncachedReason]:
    return [types_pb2.UncachedReason(reason=some.reason, pages=some.pages) for some in pages]


def uncached_from_wire(messages: Iterable[types_pb2.UncachedReason]) -> tuple[UncachedPages, ...]:
    return tuple(UncachedPages(message.reason, message.pages) for message in messages)


def usage_to_wire(usage: Usage) -> types_pb2.Usage:
    return types_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_device_tokens=usage.cached.device,
        cached_host_tokens=usage.cached.host,
        cached_storage_tokens=usage.cached.storage,
        cached_peer_tokens=usage.cached.peer,
        uncached_reasons=uncached_to_wire(usage.uncached),
        drafted_tokens=usage.drafted_tokens,
        accepted_tokens=usage.accepted_tokens,
    )


def usage_from_wire(message: types_pb2.Usage) -> Usage:
    cached = CachedTokens(
        message.cached_device_tokens,
        message.cached_host_tokens,
        message.cached_storage_tokens,
        message.cached_peer_tokens,
    )
    if cached.total > message.prompt_tokens:
        raise InvalidRequest("more tokens are cached than the prompt has", "usage")
    uncached = uncached_from_wire(message.uncached_reasons)
    return Usage(
        message.prompt_tokens,
        message.completion_tokens,
        cached,
        uncached,
        message.drafted_tokens,
        message.accepted_tokens,
    )


def logprobs_to_wire(logprobs: Mapping[int, float]) -> types_pb2.LogProbs:
    return types_pb2.LogProbs(token_ids=logprobs.keys(), logprobs=logprobs.values())


def logprobs_from_wire(message: types_pb2.LogProbs) -> dict[int, float]:
    if len(message.token_ids) != len(message.logprobs):
        raise InvalidRequest("logprobs has one number per token id", "logprobs")
    return dict(zip(message.token_ids, message.logprobs, strict=True))


def sampled_to_wire(sampled: Sampled) -> types_pb2.Sampled:
    return types_pb2.Sampled(token_id=sampled.token_id, logprobs=logprobs_to_wire(sampled.logprobs))


def sampled_from_wire(message: types_pb2.Sampled) -> Sampled:
    return Sampled(message.token_id, logprobs_from_wire(message.logprobs))


def failure_to_wire(failure: Failure) -> types_pb2.Failure:
    return types_pb2.Failure(
        code=failure.code,
        reason=failure.reason,
        message=failure.message,
        param=failure.param,
        retry_after_ms=milliseconds(failure.retry_after_seconds),
    )


def failure_from_wire(message: types_pb2.Failure) -> Failure:
    retry_after = seconds(message.retry_after_ms)
    return Failure(message.code, message.reason, message.message, message.param, retry_after)


OrderMessage = prefill_pb2.PrefillRequest | decode_pb2.ReserveRequest


def request_to_fields(request: Request) -> dict[str, Any]:
    """The fields in which orders to prefill and to decode carry the request itself."""
    return {
        "token_ids": token_ids_to_bytes(request.token_ids),
        "page_keys": keys_to_bytes(request.keys),
        "num_generated": request.num_generated,
        "sampling": sampling_to_wire(request.sampling),
        "stop_token_ids": sorted(request.stop_token_ids),
    }


def request_from_fields(message: OrderMessage) -> Request:
    token_ids = token_ids_from_bytes(message.token_ids)
    _check_tokens(token_ids, message.num_generated)
    return Request(
        request_id=check_request_id(message.context.request_id),
        token_ids=token_ids,
        keys=keys_from_bytes(message.page_keys),
        sampling=sampling_from_wire(message.sampling),
        stop_token_ids=frozenset(message.stop_token_ids),
        num_generated=message.num_generated,
    )


def _check_tokens(token_ids: TokenIds, num_generated: int) -> None:
    if len(token_ids) == 0:
        raise InvalidRequest("the prompt is empty", "token_ids")
    if num_generated >= len(token_ids):
        raise InvalidRequest("a prompt comes before what was generated", "num_generated")
