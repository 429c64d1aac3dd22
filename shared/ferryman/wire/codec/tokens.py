"""The Tokens stream: cursors from the router, frames from decode."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from ferryman.errors import InvalidRequest
from ferryman.handoff.offsets import TokenFrame
from ferryman.handoff.usage import NONE_CACHED
from ferryman.ids import check_request_id
from ferryman.wire.codec.request import (
    failure_from_wire,
    failure_to_wire,
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
from ferryman.wire.v1 import decode_pb2
from ferryman.wire.values import (
    Ending,
    Failure,
    RequestTokens,
    StreamContinues,
    StreamFinished,
    TokenCursor,
    Usage,
)

_ONE_TOKEN = struct.Struct("<I")
_GOES_ON = StreamContinues()


def cursor_to_wire(cursor: TokenCursor) -> decode_pb2.TokenCursor:
    return decode_pb2.TokenCursor(
        request_id=cursor.request_id, attempt=cursor.attempt, offset=cursor.offset
    )


def cursor_from_wire(message: decode_pb2.TokenCursor) -> TokenCursor:
    return TokenCursor(check_request_id(message.request_id), message.attempt, message.offset)


def request_tokens_to_wire(tokens: RequestTokens) -> decode_pb2.RequestTokens:
    """Runs for every token of every request, so a single token takes a short path, here and
    back."""
    ids = tokens.frame.token_ids
    message = decode_pb2.RequestTokens(
        request_id=tokens.request_id,
        attempt=tokens.frame.attempt,
        offset=tokens.frame.offset,
        token_ids=_ONE_TOKEN.pack(*ids) if len(ids) == 1 else token_ids_to_bytes(ids),
        running_hash=tokens.frame.running_hash,
        logprobs=[logprobs_to_wire(logprobs) for logprobs in tokens.logprobs],
    )
    match tokens.ending:
        case StreamContinues(held) if held is not NONE_CACHED:
            message.usage.CopyFrom(usage_to_wire(Usage(held.total, at_decode=held)))
        case StreamFinished(reason, usage):
            message.finish_reason = finish_to_wire(reason)
            message.usage.CopyFrom(usage_to_wire(usage))
        case Failure():
            message.failure.CopyFrom(failure_to_wire(tokens.ending))
    return message


def request_tokens_from_wire(message: decode_pb2.RequestTokens) -> RequestTokens:
    raw = message.token_ids
    token_ids = (
        _ONE_TOKEN.unpack(raw) if len(raw) == 4 else tuple(token_ids_from_bytes(raw).tolist())
    )
    frame = TokenFrame(message.attempt, message.offset, token_ids, message.running_hash)
    logprobs = _logprobs(message, len(token_ids)) if message.logprobs else ()
    return RequestTokens(message.request_id, frame, logprobs, _ending_from_wire(message))


def _logprobs(
    message: decode_pb2.RequestTokens, num_tokens: int
) -> tuple[Mapping[int, float], ...]:
    if len(message.logprobs) != num_tokens:
        raise InvalidRequest("logprobs has one entry per token", "logprobs")
    return tuple(logprobs_from_wire(entry) for entry in message.logprobs)


def _ending_from_wire(message: decode_pb2.RequestTokens) -> Ending:
    if message.HasField("failure"):
        return failure_from_wire(message.failure)
    if message.finish_reason:
        return StreamFinished(
            finish_from_wire(message.finish_reason), usage_from_wire(message.usage)
        )
    if message.HasField("usage"):
        return StreamContinues(usage_from_wire(message.usage).at_decode)
    return _GOES_ON
