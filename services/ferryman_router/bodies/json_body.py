"""Parses JSON bodies so that the streams of other callers go on meanwhile.

The parser in C keeps the interpreter's lock (GIL) from beginning to end: 8 MiB of one long text
take it 6 ms, 8 MiB of small keys 600 ms, and for so long no stream gets a token. So it is used for
few values. If there may be many, the standard library's parser in Python takes its place, in a
thread: it is twenty times slower, and gives the lock back every few milliseconds.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Callable
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any, NoReturn

from ferryman.errors import InvalidRequest, TooLarge
from ferryman.text.tool_calls.json_text import is_text

# The parser in C takes a few milliseconds for so many, even on a busy machine.
MAX_AT_ONCE = 8192
# Beyond, making and freeing them takes long too, and much memory. 64 prompts of 8,192 token ids
# fit, and so do 20,000 messages.
MAX_VALUES, MAX_FIELDS = 1 << 19, 1 << 16
# Each value but the first comes after one of these; those inside texts are counted too.
_BEFORE_VALUES = (b",", b":", b"[", b"{")

# The longer one first: that of UTF-16 begins that of UTF-32.
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "UTF-8"),
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")

Parse = Callable[..., Any]


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. NaN and Infinity are not JSON; neither are half characters. Of a
    field that is there twice the last one counts.

    Raises InvalidRequest saying what is wrong, TooLarge for too many values or fields. Call it off
    the event loop when the body is not small.
    """
    if not body.strip():
        raise InvalidRequest("the body is empty; send a JSON object")
    for mark, encoding in _BYTE_ORDER_MARKS:
        if body.startswith(mark):
            message = f"the body begins with a byte order mark (BOM) of {encoding}"
            raise InvalidRequest(f"{message}; send UTF-8 without one")
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
    if _HALF_CHARACTER.search(body):  # or a whole one: escapes stand in pairs then
        _check_texts(value)
    return value


# A place in a body: the place that it is in, and the key or the index there.
_Place = tuple["_Place", str | int] | None


def _check_texts(body: dict[str, Any]) -> None:
    """Raises InvalidRequest that names a text with half a character in it, of all keys and
    values. Clients make such texts where they cut one between the halves of an escape."""
    waiting: list[tuple[_Place, Any]] = [(None, body)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [((place, key), entry) for key, entry in value.items()]
            waiting += [((place, "(key)"), key) for key in value]
        elif isinstance(value, list):
            waiting += [((place, at), entry) for at, entry in enumerate(value)]
        elif isinstance(value, str) and not is_text(value):
            name = _name(place)
            raise InvalidRequest(f"{name} is not valid Unicode: it has half a character", name)


def _name(place: _Place) -> str:
    """A place as errors name it."""
    steps: list[str] = []
    while place is not None:
        place, step = place
        steps.append(f"[{step}]" if isinstance(step, int) else f".{step}")
    name = "".join(reversed(steps)).removeprefix(".")
    return name.encode(errors="replace").decode()


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
