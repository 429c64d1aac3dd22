"""Prompt lookup: what followed the last few tokens when they stood in the text before.

The last 3 tokens are looked up in prompt and output, then the last 2, then the last one; the newest
earlier place wins, and what stands behind it is the draft (Saxena 2023, "prompt lookup decoding").
A draft that reaches the end of the text goes on with itself, as LZ77 copies do: a period repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ferryman.cache.keys import TokenIds
from ferryman.schedule.caution import Cautious
from ferryman.schedule.drafting import Proposals
from ferryman.schedule.request import Request

NGRAM = "ngram"
"""What settings call it."""
LONGEST = 3
"""Tokens of the longest n-gram."""
LOOKBACK = 4096
"""Tokens of a prompt's end that are indexed: it takes milliseconds once, on the loop."""


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """Drafts come from the request's own text, fewer where it turned out not to repeat."""

    num_tokens: int

    def begin(self, request: Request) -> Proposals:
        return Cautious(NgramIndex(request.token_ids[-LOOKBACK:]))


class NgramIndex:
    """Where each n-gram of a text stood last, but for those at its very end.

    Each token is taken in once, the prompt's with the first proposal: a step costs its own new
    tokens, whatever the text's length.
    """

    def __init__(self, prompt: TokenIds) -> None:
        self._prompt = prompt
        self._text: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}
        self._num_drawn = 0

    def propose(self, drawn: Sequence[int], most: int) -> Sequence[int]:
        if not self._text:
            self._extend(self._prompt.tolist())
        self._extend(drawn[self._num_drawn :])
        self._num_drawn = len(drawn)
        place = self._newest_place() if most > 0 else None
        return () if place is None else self._copied_from(place, most)

    def _extend(self, token_ids: Sequence[int]) -> None:
        text, behind = self._text, self._behind
        for token_id in token_ids:
            # The n-grams that end here have a successor now, so they may be found.
            place = len(text)
            for length in range(1, min(LONGEST, place) + 1):
                behind[tuple(text[place - length :])] = place
            text.append(token_id)

    def _newest_place(self) -> int | None:
        text = self._text
        for length in range(min(LONGEST, len(text)), 0, -1):
            place = self._behind.get(tuple(text[-length:]))
            if place is not None:
                return place
        return None

    def _copied_from(self, place: int, count: int) -> list[int]:
        copied: list[int] = []
        for at in range(place, place + count):
            copied.append(self._text[at] if at < len(self._text) else copied[at - len(self._text)])
        return copied
