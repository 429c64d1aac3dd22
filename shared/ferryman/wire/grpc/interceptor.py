"""Turns errors of a servicer into statuses, for all four shapes of rpc. No other place does."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from ferryman.errors import InvalidRequest, TooLarge
from ferryman.wire.grpc.status import failure_of, status_of

# Smaller messages are parsed in a few milliseconds, with any content.
UNCOUNTED_BYTES = 32 << 10

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # protobuf's wire types

Deserializer = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class MalformedMessage:
    """Replaces a message whose bytes cannot be parsed; `error` is the answer to the caller."""

    error: InvalidRequest


def tolerant(deserialize: Deserializer | None, max_fields: int | None) -> Deserializer | None:
    """Returns a MalformedMessage instead of raising, because gRPC takes an error raised here for a
    bug of this server. With `max_fields` a message with more fields is not parsed."""
    if deserialize is None:
        return None
    descriptor = getattr(getattr(deserialize, "__self__", None), "DESCRIPTOR", None)

    def read(raw: bytes) -> Any:
        try:
            if max_fields is not None and descriptor is not None:
                check_num_fields(raw, descriptor, max_fields)
            return deserialize(raw)
        except InvalidRequest as error:
            return MalformedMessage(error)
        except (DecodeError, UnicodeDecodeError, ValueError):
            return MalformedMessage(InvalidRequest("the message cannot be parsed"))

    return read


def well_formed(message: Any) -> Any:
    """The message itself; raises InvalidRequest for a malformed one."""
    if isinstance(message, MalformedMessage):
        raise message.error
    return message


async def all_well_formed(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The messages of a stream; raises InvalidRequest at the first malformed one."""
    async for message in messages:
        yield well_formed(message)


def check_num_fields(raw: bytes, descriptor: Any, max_fields: int) -> None:
    """Raises TooLarge for a message with more fields, counting those of nested messages, and
    InvalidRequest for bytes that are no message. Packed numbers are one field."""
    if len(raw) <= UNCOUNTED_BYTES:
        return
    left = max_fields
    inside: list[tuple[int, int, Any]] = [(0, len(raw), descriptor)]
    while inside:
        at, end, kind = inside.pop()
        while at < end:
            left -= 1
            if left < 0:
                raise TooLarge(f"the message has more than {max_fields} fields")
            tag, at = _varint(raw, at)
            begin, at = _value(raw, at, tag & 7)
            field = kind.fields_by_number.get(tag >> 3)
            if tag & 7 == _BYTES and field is not None and field.message_type is not None:
                inside.append((begin, at, field.message_type))
        if at > end:
            raise InvalidRequest("the message cannot be parsed")


def _value(raw: bytes, at: int, wire_type: int) -> tuple[int, int]:
    """The begin and end of a field's value."""
    if wire_type == _VARINT:
        return at, _varint(raw, at)[1]
    if wire_type == _FIXED64:
        return at, at + 8
    if wire_type == _FIXED32:
        return at, at + 4
    if wire_type != _BYTES:
        raise InvalidRequest("the message cannot be parsed")
    size, begin = _varint(raw, at)
    return begin, begin + size


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """A number and the offset after it."""
    number = shift = 0
    while at < len(raw) and shift < 70:
        byte = raw[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number, at
    raise InvalidRequest("the message cannot be parsed")


log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Check = Callable[[str, Context], None]
"""Raises a FerrymanError for a caller, known by the context, that may not call the method."""
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Turns FerrymanErrors into their statuses, and anything else into INTERNAL with a log entry.

    Cancellation passes through: a client that leaves is ordinary. Bytes that are no message are
    INVALID_ARGUMENT, and so is a message of more than `max_fields` fields. `check` is asked before
    the servicer is.
    """

    def __init__(self, max_fields: int | None = None, check: Check | None = None) -> None:
        self._max_fields, self._check = max_fields, check or _everybody

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        if handler.response_streaming:
            behaviour = handler.stream_stream or handler.unary_stream
            guarded: Any = _guarded_stream(behaviour, method, self._check)
        else:
            behaviour = handler.stream_unary or handler.unary_unary
            guarded = _guarded_call(behaviour, method, self._check)
        return _MAKERS[handler.request_streaming, handler.response_streaming](
            guarded,
            tolerant(handler.request_deserializer, self._max_fields),
            handler.response_serializer,
        )


_MAKERS: dict[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _everybody(_method: str, _context: Context) -> None:
    """Refuses no caller."""


def _guarded_call(behaviour: Any, method: str, check: Check) -> Any:
    async def call(request: Any, context: Context) -> Any:
        try:
            check(method, context)
            return await behaviour(_checked(request), context)
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception as error:
            await _abort(context, method, error)

    return call


def _guarded_stream(behaviour: Any, method: str, check: Check) -> Any:
    if not inspect.isasyncgenfunction(behaviour):  # health's Watch writes through the context
        return _guarded_call(behaviour, method, check)

    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            check(method, context)
            async with aclosing(behaviour(_checked(request), context)) as responses:
                async for response in responses:
                    yield response
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception as error:
            await _abort(context, method, error)

    return stream


def _checked(request: Any) -> Any:
    """A request, or a stream of them, that is well-formed, or raises InvalidRequest."""
    if isinstance(request, AsyncIterator):
        return all_well_formed(request)
    return well_formed(request)


async def _abort(context: Context, method: str, error: Exception) -> NoReturn:
    failure = failure_of(error)
    if failure.code == "INTERNAL":
        log.error("rpc failed method=%s", method, exc_info=error)
    else:
        log.debug("rpc refused method=%s reason=%s: %s", method, failure.reason, failure.message)
    code, details, trailers = status_of(failure)
    await context.abort(code, details, (*trailers, *(context.trailing_metadata() or ())))
