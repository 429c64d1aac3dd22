"""Errors as OpenAI shows them: one object with a message, a type, a code and the parameter."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from ferryman.errors import Exhausted, FerrymanError, InvalidRequest
from ferryman.wire.status import WITHHELD
from ferryman_router.transcript import Broken

_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    404: "not_found_error",
    499: "cancelled_error",
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


def problem_body(error: FerrymanError) -> bytes:
    return json.dumps({"error": problem(error)}).encode()


def problem_headers(error: FerrymanError) -> dict[str, str]:
    """Whole seconds, at least one: the header knows no fractions."""
    if isinstance(error, Exhausted):
        return {"retry-after": str(max(1, math.ceil(error.retry_after_seconds)))}
    return {}


def broken_frame(broken: Broken) -> bytes:
    """The last frame of a stream that fails on its way: where, why, and whether to try again."""
    said = problem(broken.error) | {
        "stage": broken.stage,
        "reason": broken.error.reason,
        "retryable": broken.is_retryable,
        "offset": broken.offset,
    }
    return b"data: " + json.dumps({"error": said}).encode() + b"\n\n"
