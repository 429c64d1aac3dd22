"""Token ids to text, a few at a time; nothing is shown that a later token could still change.

A character may be spread over several tokens: its bytes are held back until it is whole. `flush`
ends the text; what is still incomplete then becomes U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from ferryman.text.pieces import PieceTable

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
WINDOW_TOKENS = 8


class Detokenizer(Protocol):
    """Feed token ids in order; the pieces returned join to the text."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that is certain after these tokens and was not returned before."""
        ...

    def flush(self) -> str:
        """What was held back; the text ends here."""
        ...


class ByteDetokenizer:
    """For tokenizers whose tokens are byte strings: a table and an incremental UTF-8 decoder."""

    __slots__ = ("_decode", "_pieces")

    def __init__(self, pieces: PieceTable) -> None:
        self._pieces = pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, token_ids: Sequence[int]) -> str:
        pieces = self._pieces
        return self._decode(b"".join([pieces[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For all other tokenizers: decodes a window twice, without and with what is new.

    The window starts a few tokens before the first one not yet shown, so that the decoder sees
    the neighbours on which spaces and joins depend.
    """

    __slots__ = ("_decode", "_shown", "_start", "_token_ids")

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._token_ids = list(context[-WINDOW_TOKENS:])
        self._start, self._shown = 0, len(self._token_ids)

    def feed(self, token_ids: Sequence[int]) -> str:
        self._token_ids.extend(token_ids)
        before, after = self._window()
        waited = len(self._token_ids) - self._shown > WINDOW_TOKENS  # it will not become whole
        if len(after) <= len(before) or (after.endswith(REPLACEMENT) and not waited):
            return ""
        self._start, self._shown = self._shown, len(self._token_ids)
        self._forget()
        return after[len(before) :]

    def flush(self) -> str:
        before, after = self._window()
        self._start = self._shown = len(self._token_ids)
        return after[len(before) :]

    def _window(self) -> tuple[str, str]:
        shown = self._decode(self._token_ids[self._start : self._shown])
        return shown, self._decode(self._token_ids[self._start :])

    def _forget(self) -> None:
        """Keeps the list as short as its window, however long the text becomes."""
        keep_from = min(self._start, max(0, self._shown - WINDOW_TOKENS))
        del self._token_ids[:keep_from]
        self._start -= keep_from
        self._shown -= keep_from
