"""What of an answer has arrived, over however many connections. Pure."""

from __future__ import annotations

from dataclasses import replace

from ferryman.errors import CorruptState, Stale
from ferryman.wire.public import GenerateFinished, TokenChunk


class Received:
    """The tokens and the text that the caller has, and where in the answer the stream is.

    A broken stream goes on where it was. When the router has forgotten the request, it is sent
    anew: the same seed draws the same tokens, and those that the caller has are dropped, once they
    were found to be the same.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._num_chars = 0
        self._chars_reached = 0
        self.reached = 0

    @property
    def is_empty(self) -> bool:
        return not self._token_ids

    def begin_anew(self) -> None:
        """The next chunk is the first of the answer."""
        self.reached, self._chars_reached = 0, 0

    def take(self, chunk: TokenChunk) -> TokenChunk | None:
        """What is new in a chunk, if anything. CorruptState: a hole. Stale: a repeated answer is
        not the same."""
        if chunk.offset != self.reached:
            raise CorruptState(f"tokens came at offset {chunk.offset} instead of {self.reached}")
        known = tuple(self._token_ids[self.reached : self.reached + len(chunk.token_ids)])
        if chunk.token_ids[: len(known)] != known:
            raise Stale("the answer was begun anew and is not the same; ask again")
        self.reached += len(chunk.token_ids)
        new, text = chunk.token_ids[len(known) :], self._new_text(chunk.text)
        if not new and not text:
            return None
        self._token_ids += new
        return replace(
            chunk,
            offset=chunk.offset + len(known),
            token_ids=new,
            text=text,
            logprobs=chunk.logprobs[len(known) :],
        )

    def finish(self, end: GenerateFinished) -> GenerateFinished:
        """The end, without text that the caller has."""
        return replace(end, text=self._new_text(end.text))

    def _new_text(self, text: str) -> str:
        new = text[max(0, self._num_chars - self._chars_reached) :]
        self._chars_reached += len(text)
        self._num_chars = max(self._num_chars, self._chars_reached)
        return new
