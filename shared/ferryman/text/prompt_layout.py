"""The places of a conversation's messages in its token ids.

A template decides where a message stands and what stands around it. Its text stands there as it is,
so the bytes that the tokens spell are searched for it, from the end on: between a message and the
next one a template writes little. No template is known here, and a message that it drops or
rewrites has no place. Places are hints, as all that is made of them: nothing is ever reused by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ferryman.cache.keys import TokenIds
from ferryman.text.chat import Message
from ferryman.text.pieces import PieceTable

# Messages that are searched for: the last ones, and the first of all.
MAX_MESSAGES = 1024
# Bytes that a template writes between two messages: calls, thoughts, and the tools.
_BETWEEN = 512 << 10


class TextSpan(NamedTuple):
    """The bytes of a message's text among those of a prompt; `skipped` bytes at its beginning are
    not there, because the template strips it."""

    begin: int
    end: int
    skipped: int


class PromptLayout:
    """Finds the texts of `messages` in the `token_ids` [tokens] that a template made of them."""

    def __init__(
        self, pieces: PieceTable, token_ids: TokenIds, messages: Sequence[Message]
    ) -> None:
        spelt = [pieces[token_id] for token_id in token_ids.tolist()]
        self._ends = np.fromiter(accumulate(map(len, spelt)), dtype=np.int64, count=len(spelt))
        self._texts = [str(message.get("content") or "") for message in messages]
        self._spelt = b"".join(spelt)
        self._spans = _spans(self._spelt, self._texts)

    def begin(self, index: int) -> int | None:
        """The position before a message's text; None if it has no place."""
        span = self._spans.get(index)
        return None if span is None else self._position(span.begin)

    def end(self, index: int) -> int | None:
        """The position after a message's text; None if it has no place."""
        span = self._spans.get(index)
        return None if span is None else self._position(span.end)

    def after(self, index: int, num_chars: int) -> int | None:
        """The position after so many characters of a message's text; None if it has no place."""
        span = self._spans.get(index)
        if span is None:
            return None
        num_bytes = len(self._texts[index][:num_chars].encode()) - span.skipped
        return self._position(min(span.end, span.begin + max(0, num_bytes)))

    def has_before(self, position: int, texts: Sequence[str]) -> bool:
        """Whether these texts stand before a position."""
        end = int(self._ends[position - 1]) if position else 0
        return all(0 <= self._spelt.find(text.encode(), 0, end) for text in texts)

    def _position(self, byte: int) -> int:
        """The tokens that end before this byte, or at it."""
        return int(np.searchsorted(self._ends, byte, side="right"))


def _spans(spelt: bytes, texts: Sequence[str]) -> dict[int, TextSpan]:
    """The spans of texts in their order, by index."""
    spans: dict[int, TextSpan] = {}
    bound = len(spelt)
    last = range(max(1, len(texts) - MAX_MESSAGES), len(texts))
    for index in (*reversed(last), *range(min(1, len(texts)))):
        span = _last_span(spelt, texts[index], bound)
        if span is not None:
            spans[index], bound = span, span.begin
    return spans


def _last_span(spelt: bytes, text: str, bound: int) -> TextSpan | None:
    """The last place of a text before `bound`, as it is or stripped, as most templates show it."""
    words = text.strip()
    if not words:
        return None
    core = words.encode()
    begin = spelt.rfind(core, max(0, bound - len(core) - _BETWEEN), bound)
    if begin < 0:
        return None
    end = begin + len(core)
    lead, _, trail = text.partition(words)
    before, after = len(lead.encode()), len(trail.encode())
    if begin >= before and spelt[begin - before : end + after] == text.encode():
        return TextSpan(begin - before, min(bound, end + after), 0)
    return TextSpan(begin, end, before)
