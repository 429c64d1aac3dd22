"""Errors as gRPC statuses and back: the code, the message, and a typed reason in the trailers.

trailer                  meaning
ferryman-reason          the name of the error's class, such as OutOfSlots
ferryman-param           INVALID_ARGUMENT: the field to change
ferryman-retry-after-ms  RESOURCE_EXHAUSTED, NoWorker, Stopping: an estimate of the time until there
                         is room, a worker, or another process
grpc-status-details-bin  the same as google.rpc.RetryInfo, for other clients
ferryman-stage           an answer that broke off: the stage that the request had reached
ferryman-offset          the same: the number of tokens that it had
ferryman-retryable       the same: "true" when another try may do better
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio

from ferryman import errors
from ferryman.errors import FerrymanError
from ferryman.wire.v1 import status_pb2
from ferryman.wire.values import Failure

log = logging.getLogger(__name__)

REASON = "ferryman-reason"
PARAM = "ferryman-param"
RETRY_AFTER = "ferryman-retry-after-ms"
STAGE = "ferryman-stage"
OFFSET = "ferryman-offset"
RETRYABLE = "ferryman-retryable"
WITHHELD = "internal error; the server's log has the details"

# gRPC's own statuses for a broken connection, whichever end broke it.
_BROKEN = ("UNAVAILABLE", "INTERNAL", "UNKNOWN", "CANCELLED")
_DIFFERENCES_HEAD = "state manifests differ: "
_TOO_LARGE = "larger than max"

_DETAILS = "grpc-status-details-bin"
_RETRY_INFO_TYPE = "type.googleapis.com/google.rpc.RetryInfo"

Metadata = tuple[tuple[str, str | bytes], ...]


def _all_errors(kind: type[FerrymanError]) -> Iterator[type[FerrymanError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _all_errors(child)


# By reason: errors of this project. By code: errors of gRPC itself, or of another server.
_BY_REASON = {kind.__name__: kind for kind in _all_errors(FerrymanError)}
_BY_CODE: dict[str, type[FerrymanError]] = {
    "INVALID_ARGUMENT": errors.InvalidRequest,
    "OUT_OF_RANGE": errors.InvalidRequest,
    "UNAUTHENTICATED": errors.Unauthenticated,
    "PERMISSION_DENIED": errors.PermissionDenied,
    "NOT_FOUND": errors.NotFound,
    "RESOURCE_EXHAUSTED": errors.Exhausted,
    "ABORTED": errors.Stale,
    "FAILED_PRECONDITION": errors.ManifestMismatch,
    "UNAVAILABLE": errors.Unavailable,
    "DATA_LOSS": errors.CorruptState,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
    "CANCELLED": errors.Cancelled,
}


def failure_of(error: BaseException) -> Failure:
    """Any error as a value. An error that is no FerrymanError is a bug, and its message is
    withheld."""
    typed = _known(error)
    if typed is None:
        return Failure("INTERNAL", "Internal", WITHHELD)
    param = typed.param if isinstance(typed, errors.InvalidRequest) else ""
    return Failure(typed.code, typed.reason, str(typed), param, typed.retry_after_seconds)


def take_failure(task: asyncio.Task[Any]) -> None:
    """Takes the error of a task that has ended, whose caller may have gone and not ask for it.

    asyncio would log it as nobody's. A bug is logged here.
    """
    error = None if task.cancelled() else task.exception()
    if error is not None and _known(error) is None:
        log.error("a task failed name=%s", task.get_name(), exc_info=error)


def error_of(failure: Failure) -> FerrymanError:
    """Inverse of `failure_of`; for an unknown reason, the error class of its code."""
    kind = _BY_REASON.get(failure.reason) or _BY_CODE.get(failure.code) or FerrymanError
    if issubclass(kind, errors.InvalidRequest):
        return kind(failure.message, failure.param)
    if issubclass(kind, errors.Exhausted | errors.NoWorker):
        return kind(failure.message, failure.retry_after_seconds)
    if issubclass(kind, errors.ManifestMismatch):
        return kind(tuple(failure.message.removeprefix(_DIFFERENCES_HEAD).split("; ")))
    return kind(failure.message)


def _known(error: BaseException) -> FerrymanError | None:
    """The error to answer with: in a group, the first that has a status."""
    match error:
        case FerrymanError():
            return error
        case TimeoutError():
            return errors.DeadlineExceeded("the time for this call is over")
        case asyncio.CancelledError():
            return errors.Cancelled("the call was cancelled")
        case BaseExceptionGroup():
            failures = (_known(inner) for inner in error.exceptions)
            return next((failure for failure in failures if failure is not None), None)
    return None


def status_of(failure: Failure) -> tuple[grpc.StatusCode, str, Metadata]:
    """The code, the details and the trailers of a failure."""
    trailers: list[tuple[str, str | bytes]] = [(REASON, failure.reason)]
    if failure.param:
        trailers.append((PARAM, failure.param.encode("ascii", "backslashreplace").decode()))
    if failure.retry_after_seconds > 0:
        trailers.append((RETRY_AFTER, str(round(failure.retry_after_seconds * 1000))))
        trailers.append((_DETAILS, _retry_details(failure)))
    return grpc.StatusCode[failure.code], failure.message, tuple(trailers)


def is_unexplained(error: grpc.aio.AioRpcError) -> bool:
    """Whether no server of ours sent this error: the connection broke before an answer came."""
    is_explained = any(key == REASON for key, _ in error.trailing_metadata() or ())
    return not is_explained and error.code().name in _BROKEN


def _retry_details(failure: Failure) -> bytes:
    """A google.rpc.Status with one google.rpc.RetryInfo. Its code and message must be those that
    the call ends with, or clients ignore it."""
    delay = status_pb2.RetryInfo()
    delay.retry_delay.FromMilliseconds(round(failure.retry_after_seconds * 1000))
    number: int = grpc.StatusCode[failure.code].value[0]
    details = status_pb2.StatusDetails(code=number, message=failure.message)
    details.details.add(type_url=_RETRY_INFO_TYPE, value=delay.SerializeToString())
    return details.SerializeToString()


def typed(error: grpc.aio.AioRpcError) -> FerrymanError:
    """A failed call as an error for its caller; Unreachable when no server answered it."""
    if is_unexplained(error):
        return errors.Unreachable(error.details() or "the connection broke")
    trailers = {key: str(value) for key, value in error.trailing_metadata() or ()}
    code, message = error.code().name, error.details() or ""
    reason, param = trailers.get(REASON, ""), trailers.get(PARAM, "")
    if not reason and code == "RESOURCE_EXHAUSTED" and _TOO_LARGE in message:
        reason = errors.TooLarge.__name__
    retry_ms = trailers.get(RETRY_AFTER, "")
    # Another server's refusal for want of room names no time.
    least = 1.0 if code == "RESOURCE_EXHAUSTED" else 0.0
    retry = int(retry_ms) / 1000 if retry_ms.isdecimal() else least
    return error_of(Failure(code, reason, message, param, retry))


@contextmanager
def typed_errors() -> Iterator[None]:
    """Used around client calls: gRPC's errors leave the block as FerrymanErrors."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise typed(error) from error
