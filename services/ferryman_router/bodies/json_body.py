"""Parses JSON bodies so that the streams of other callers go on meanwhile.

The parser in C keeps the interpreter's lock (GIL) from beginning to end: 8 MiB of one long text
take it 6 ms, 8 MiB of small keys 600 ms, and for so long no stream gets a token. So it is used for
few values. If there may be many, the standard library's parser in Python takes its place, in a
thread: it is twenty times slower, and gives the lock back every few milliseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any, NoReturn

from ferryman.errors import InvalidRequest, TooLarge

# The parser in C takes a few milliseconds for so many, even on a busy machine.
MAX_AT_ONCE = 8192
# Beyond, making and freeing them takes long too, and much memory. 64 prompts of 8,192 token ids
# fit, and so do 20,000 messages.
MAX_VALUES, MAX_FIELDS = 1 << 19, 1 << 16
# Each value but the first comes after one of these; those inside texts are counted too.
_BEFORE_VALUES = (b",", b":", b"[", b"{")

Parse = Callable[..., Any]


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. NaN and Infinity are not JSON; neither are half characters.

    Raises InvalidRequest saying what is wrong, TooLarge for too many values or fields. Call it off
    the event loop when the body is not small.
    """
    try:
        text = body.decode("utf-8")
        value = _decoder(body).decode(text)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8 at byte {error.start}") from error
    except InvalidRequest:
        raise
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


def _decoder(body: bytes) -> json.JSONDecoder:
    if sum(map(body.count, _BEFORE_VALUES)) <= MAX_AT_ONCE:
        return json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
    return _YieldingDecoder()


class _YieldingDecoder(json.JSONDecoder):
    """Parses with Python's own loops; no call into C covers more than one text."""

    def __init__(self) -> None:
        super().__init__(parse_constant=_refuse, parse_float=_finite)
        values, fields = _Count(MAX_VALUES, "values"), _Count(MAX_FIELDS, "fields")
        parse_object: Parse = getattr(self, "parse_object")  # noqa: B009

        def parse_counted(text: Any, strict: Any, scan_once: Parse, *hooks: Any) -> Any:
            return parse_object(text, strict, fields.before(scan_once), *hooks)

        self.parse_object: Parse = parse_counted
        # The scanner asks these for every value; the names are the standard library's.
        for name in ("parse_object", "parse_array", "parse_string", "parse_int", "parse_float"):
            setattr(self, name, values.before(getattr(self, name)))
        self.scan_once = py_make_scanner(self)


class _Count:
    """A count of values or fields in a body so far."""

    def __init__(self, at_most: int, what: str) -> None:
        self._left, self._refusal = at_most, f"the body has more than {at_most} {what}"

    def before(self, parse: Parse) -> Parse:
        """Counts one more, and parses it; raises TooLarge instead when there are too many."""

        def counted(*arguments: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                raise TooLarge(self._refusal)
            return parse(*arguments)

        return counted


def _refuse(constant: str) -> NoReturn:
    raise InvalidRequest(f"{constant} is not valid JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InvalidRequest(f"{text[:40]} is too large a number")
    return value
