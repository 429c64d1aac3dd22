"""JSON is what the standard library says it is, however many values there are, up to a bound."""

from __future__ import annotations

import gc
import json
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferryman.errors import InvalidRequest, TooLarge
from ferryman_router.bodies import json_body
from ferryman_router.bodies.json_body import MAX_AT_ONCE, MAX_FIELDS, MAX_VALUES, parse_object

PADDING = ["é, [{:"] * (MAX_AT_ONCE + 1)  # enough values for the parser that yields

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(value=VALUES, ascii_only=st.booleans())
def test_both_parsers_find_what_was_written(value: Any, ascii_only: bool) -> None:
    for padding in ([], PADDING):
        whole = {"value": value, "padding": padding}
        body = json.dumps(whole, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
        try:
            body.decode()
        except UnicodeDecodeError:
            continue
        assert parse_object(body) == whole


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"a": NaN, ', "NaN"),
        ('{"a": 1e999, ', "1e999"),
        ('{"a": [}, ', "JSON"),
        ('{"a": ' + "[" * 5000, "nested"),
        ('["a", ', "JSON"),
    ],
    ids=["NaN", "infinity", "a hole", "depth", "a list"],
)
def test_both_parsers_refuse_what_is_wrong(body: str, said: str) -> None:
    for padding in ("", json.dumps(PADDING)):
        with pytest.raises(InvalidRequest, match=said):
            parse_object((body + '"padding": ' + padding).encode())


def _numbers(count: int) -> bytes:
    return b'{"prompt":[' + b",".join([b"1"] * count) + b"]}"


def _keys(count: int) -> bytes:
    return b"{" + b",".join(b'"k%d":1' % index for index in range(count)) + b"}"


def test_values_and_fields_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(parse_object(_keys(MAX_FIELDS))) == MAX_FIELDS
    with pytest.raises(TooLarge, match="fields"):
        parse_object(_keys(MAX_FIELDS + 1))
    monkeypatch.setattr(json_body, "MAX_VALUES", MAX_AT_ONCE + 3)
    assert len(parse_object(_numbers(MAX_AT_ONCE + 1))["prompt"]) == MAX_AT_ONCE + 1
    with pytest.raises(TooLarge, match="values"):
        parse_object(_numbers(MAX_AT_ONCE + 2))


class LongestHold:
    """The most CPU time of this thread in which a thread that wakes at once could not run.

    The clock is this thread's own, and no collection of other tests' garbage falls into it.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> LongestHold:
        gc.collect()
        gc.freeze()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        last = time.clock_gettime(self._clock)
        while not self._is_over.wait(0.001):
            now = time.clock_gettime(self._clock)
            self.seconds, last = max(self.seconds, now - last), now


HEAVY = {
    "numbers": _numbers(MAX_VALUES // 2),
    "fields": _keys(MAX_FIELDS),
    "far too many fields": _keys(600_000),
    "objects": b'{"m":[' + b",".join([b"{}"] * (MAX_VALUES // 4)) + b"]}",
    "one text": b'{"prompt":"' + b"a, [\\n" * 1_300_000 + b'"}',
}


def _hold_of_parsing(body: bytes) -> float:
    """CPU seconds for which other threads had to wait at a time."""
    with LongestHold() as hold:
        try:
            parse_object(body)
        except TooLarge:
            pass
    return hold.seconds


@pytest.mark.parametrize("body", HEAVY.values(), ids=HEAVY)
def test_no_body_of_the_largest_size_holds_up_other_threads(body: bytes) -> None:
    assert len(body) < 9 << 20
    tries = (_hold_of_parsing(body) for _ in range(4))
    assert any(seconds < 0.15 for seconds in tries), "a body that holds up does so every time"
