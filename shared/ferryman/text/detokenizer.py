"""Token ids to text, a few at a time. Text that a later token could still change is held back.

A character may be spread over several tokens: its bytes are held back until it is complete. `flush`
ends the text; an incomplete character then becomes U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from ferryman.text.pieces import PieceTable, ShownPieces

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
WINDOW_TOKENS = 8


class Detokenizer(Protocol):
    """Turns token ids, fed in order, into pieces of text; the pieces joined are the text."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that is now certain and was not returned before."""
        ...

    def flush(self) -> str:
        """The text that was held back, as the end of the text."""
        ...


class ByteDetokenizer:
    """A detokenizer for tokens that are byte strings: a table and an incremental UTF-8 decoder."""

    __slots__ = ("_decode", "_pieces")

    def __init__(self, pieces: PieceTable | ShownPieces) -> None:
        self._pieces = pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, token_ids: Sequence[int]) -> str:
        pieces = self._pieces
        return self._decode(b"".join([pieces[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """A detokenizer for all other tokens: it decodes a window without and with the new tokens.

    The window starts a few tokens before the first one not yet shown, so the decoder sees the
    neighbours on which spaces and joins depend.
    """

    __slots__ = ("_decode", "_shown", "_start", "_token_ids")

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._token_ids = list(context[-WINDOW_TOKENS:])
        self._start, self._shown = 0, len(self._token_ids)

    def feed(self, token_ids: Sequence[int]) -> str:
        # One token at a time. The number of waiting tokens decides what is held back, so several at
        # once would give a different text.
        return "".join([self._feed(token_id) for token_id in token_ids])

    def _feed(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        before, after = self._window()
        # the character will not become complete
        waited = len(self._token_ids) - self._shown > WINDOW_TOKENS
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
        visible = self._decode(self._token_ids[self._start : self._shown])
        return visible, self._decode(self._token_ids[self._start :])

    def _forget(self) -> None:
        """Keeps the list as short as its window, for a text of any length."""
        keep_from = min(self._start, max(0, self._shown - WINDOW_TOKENS))
        del self._token_ids[:keep_from]
        self._start -= keep_from
        self._shown -= keep_from
