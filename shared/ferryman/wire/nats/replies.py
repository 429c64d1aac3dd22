"""Answers to orders on the bus: the payload, or an error in headers.

The two `Nats-Service-Error` headers are those of NATS' own services, so its tools show them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ferryman.wire.grpc.status import error_of, failure_of
from ferryman.wire.nats.bus import Answer, BusMessage
from ferryman.wire.values import Failure

log = logging.getLogger(__name__)

_MESSAGE, _CODE = "Nats-Service-Error", "Nats-Service-Error-Code"
_REASON, _PARAM, _RETRY = "Ferryman-Reason", "Ferryman-Param", "Ferryman-Retry-After-Ms"


async def answer_to(message: BusMessage, answer: Answer) -> tuple[bytes, dict[str, str]]:
    """Payload and headers of the answer; an error of `answer` becomes headers."""
    try:
        return await answer(message), {}
    except Exception as error:
        failure = failure_of(error)
        if failure.code == "INTERNAL":
            log.error("order failed subject=%s", message.subject, exc_info=error)
        return b"", _failure_to_headers(failure)


def answer_from(payload: bytes, headers: Mapping[str, str]) -> bytes:
    """Returns the payload, or raises the error in the headers."""
    if _CODE not in headers:
        return payload
    retry_ms = headers.get(_RETRY, "")
    raise error_of(
        Failure(
            code=headers[_CODE],
            reason=headers.get(_REASON, ""),
            message=headers.get(_MESSAGE, ""),
            param=headers.get(_PARAM, ""),
            retry_after_seconds=int(retry_ms) / 1000 if retry_ms.isdecimal() else 0.0,
        )
    )


def _failure_to_headers(failure: Failure) -> dict[str, str]:
    return {
        _MESSAGE: failure.message.replace("\n", " "),
        _CODE: failure.code,
        _REASON: failure.reason,
        _PARAM: failure.param,
        _RETRY: str(round(failure.retry_after_seconds * 1000)),
    }
