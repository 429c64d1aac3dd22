"""The one place where an error of a servicer becomes a status, for all four shapes of rpc."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import grpc.aio

from ferryman.wire.status import failure_of, status_of

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Turns FerrymanErrors into their statuses, and anything else into INTERNAL with a log entry.

    Cancellation passes through: a client that is gone is ordinary.
    """

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        if handler.response_streaming:
            behaviour = handler.stream_stream or handler.unary_stream
            guarded: Any = _guarded_stream(behaviour, method)
        else:
            behaviour = handler.stream_unary or handler.unary_unary
            guarded = _guarded_call(behaviour, method)
        return _MAKERS[handler.request_streaming, handler.response_streaming](
            guarded, handler.request_deserializer, handler.response_serializer
        )


_MAKERS: dict[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _guarded_call(behaviour: Any, method: str) -> Any:
    async def call(request: Any, context: Context) -> Any:
        try:
            return await behaviour(request, context)
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception as error:
            await _abort(context, method, error)

    return call


def _guarded_stream(behaviour: Any, method: str) -> Any:
    if not inspect.isasyncgenfunction(behaviour):  # health's Watch writes through the context
        return _guarded_call(behaviour, method)

    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception as error:
            await _abort(context, method, error)

    return stream


async def _abort(context: Context, method: str, error: Exception) -> NoReturn:
    failure = failure_of(error)
    if failure.code == "INTERNAL":
        log.error("rpc failed method=%s", method, exc_info=error)
    else:
        log.debug("rpc refused method=%s reason=%s: %s", method, failure.reason, failure.message)
    await context.abort(*status_of(failure))
