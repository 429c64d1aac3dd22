"""Errors as gRPC statuses and back: the code, the message, and a typed reason in the trailers.

trailer                  meaning
ferryman-reason          the name of the error's class, such as OutOfSlots
ferryman-param           INVALID_ARGUMENT: the field to change
ferryman-retry-after-ms  RESOURCE_EXHAUSTED: a guess at when there will be room
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import grpc
import grpc.aio

from ferryman import errors
from ferryman.errors import FerrymanError
from ferryman.wire.values import Failure

REASON = "ferryman-reason"
PARAM = "ferryman-param"
RETRY_AFTER = "ferryman-retry-after-ms"
WITHHELD = "internal error; the server's log has the details"

_DIFFERENCES_HEAD = "state manifests differ: "
_TOO_LARGE = "larger than max"

Metadata = tuple[tuple[str, str], ...]


def _all_errors(kind: type[FerrymanError]) -> Iterator[type[FerrymanError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _all_errors(child)


# By reason: what this project raises. By code: what gRPC itself, or a stranger, answers.
_BY_REASON = {kind.__name__: kind for kind in _all_errors(FerrymanError)}
_BY_CODE: dict[str, type[FerrymanError]] = {
    "INVALID_ARGUMENT": errors.InvalidRequest,
    "OUT_OF_RANGE": errors.InvalidRequest,
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
    """Any error as a value. What is no FerrymanError is a bug, and its message stays here."""
    known = _known(error)
    if known is None:
        return Failure("INTERNAL", "Internal", WITHHELD)
    param = known.param if isinstance(known, errors.InvalidRequest) else ""
    retry = known.retry_after_seconds if isinstance(known, errors.Exhausted) else 0.0
    return Failure(known.code, known.reason, str(known), param, retry)


def error_of(failure: Failure) -> FerrymanError:
    """The error that `failure_of` was given; of an unknown reason, the next one of its code."""
    kind = _BY_REASON.get(failure.reason) or _BY_CODE.get(failure.code) or FerrymanError
    if issubclass(kind, errors.InvalidRequest):
        return kind(failure.message, failure.param)
    if issubclass(kind, errors.Exhausted):
        return kind(failure.message, failure.retry_after_seconds)
    if issubclass(kind, errors.ManifestMismatch):
        return kind(tuple(failure.message.removeprefix(_DIFFERENCES_HEAD).split("; ")))
    return kind(failure.message)


def _known(error: BaseException) -> FerrymanError | None:
    """The error to answer with: of a group, the first that has a status."""
    match error:
        case FerrymanError():
            return error
        case TimeoutError():
            return errors.DeadlineExceeded("the time for this call is over")
        case asyncio.CancelledError():
            return errors.Cancelled("the call was cancelled")
        case BaseExceptionGroup():
            found = (_known(each) for each in error.exceptions)
            return next((each for each in found if each is not None), None)
    return None


def status_of(failure: Failure) -> tuple[grpc.StatusCode, str, Metadata]:
    """The code, the details and the trailers with which a failure leaves."""
    trailers = [(REASON, failure.reason)]
    if failure.param:
        trailers.append((PARAM, failure.param.encode("ascii", "backslashreplace").decode()))
    if failure.retry_after_seconds > 0:
        trailers.append((RETRY_AFTER, str(round(failure.retry_after_seconds * 1000))))
    return grpc.StatusCode[failure.code], failure.message, tuple(trailers)


def typed(error: grpc.aio.AioRpcError) -> FerrymanError:
    """What a failed call means to its caller."""
    trailers = {key: str(value) for key, value in error.trailing_metadata() or ()}
    code, message = error.code().name, error.details() or ""
    reason, param = trailers.get(REASON, ""), trailers.get(PARAM, "")
    if not reason and code == "RESOURCE_EXHAUSTED" and _TOO_LARGE in message:
        reason = errors.TooLarge.__name__
    retry_ms = trailers.get(RETRY_AFTER, "")
    retry = int(retry_ms) / 1000 if retry_ms.isdecimal() else 1.0
    return error_of(Failure(code, reason, message, param, retry))


def raise_typed(error: grpc.aio.AioRpcError) -> NoReturn:
    raise typed(error) from error


@contextmanager
def typed_errors() -> Iterator[None]:
    """Around client calls: gRPC's errors leave the block as FerrymanErrors."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise typed(error) from error
