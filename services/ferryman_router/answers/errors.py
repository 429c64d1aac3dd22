"""Errors as OpenAI and Anthropic show them: one object with a message, a type, a code and the
parameter."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response

from ferryman.errors import Exhausted, FerrymanError, InvalidRequest
from ferryman.wire.grpc.status import WITHHELD
from ferryman_router.request.response import OutputFailed

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    404: "not_found_error",
    499: "cancelled_error",
    504: "timeout_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")


def problem(error: FerrymanError) -> dict[str, Any]:
    """The error object; the message of a bug stays in the log."""
    status = error.http_status
    is_bug = error.code == "INTERNAL"
    by_status = "invalid_request_error" if status < 500 else "server_error"
    return {
        "message": WITHHELD if is_bug else str(error),
        "type": _TYPES.get(status, by_status),
        "param": (error.param or None) if isinstance(error, InvalidRequest) else None,
        "code": _CAPITAL.sub("_", error.reason).lower(),
    }


ErrorBody = Callable[[FerrymanError], dict[str, Any]]


def openai_error(error: FerrymanError) -> dict[str, Any]:
    """The body of a refusal in OpenAI's form."""
    return {"error": problem(error)}


def anthropic_error(error: FerrymanError) -> dict[str, Any]:
    """The body of a refusal in Anthropic's form; its types follow from the status."""
    by_status = "invalid_request_error" if error.http_status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(error.http_status, by_status)
    return {"type": "error", "error": problem(error) | {"type": kind}}


def problem_response(
    error: FerrymanError,
    status: int = 0,
    headers: Mapping[str, str] | None = None,
    *,
    form: ErrorBody = openai_error,
) -> Response:
    """The error as a response, with its own status unless another is given."""
    all_headers = dict(headers or {})
    if isinstance(error, Exhausted) or error.retry_after_seconds > 0:
        # Whole seconds, at least one: the header knows no fractions.
        all_headers["retry-after"] = str(max(1, math.ceil(error.retry_after_seconds)))
    return Response(
        json.dumps(form(error)), status or error.http_status, all_headers, "application/json"
    )


def failure_fields(broken: OutputFailed) -> dict[str, Any]:
    """The fields of a stream's failure: at what place, why, and whether to try again."""
    return problem(broken.error) | {
        "stage": broken.stage,
        "reason": broken.error.reason,
        "retryable": broken.is_retryable,
        "offset": broken.offset,
    }


def broken_frame(broken: OutputFailed) -> bytes:
    """The last frame of a stream of choices that fails on its way."""
    return b"data: " + json.dumps({"error": failure_fields(broken)}).encode() + b"\n\n"
