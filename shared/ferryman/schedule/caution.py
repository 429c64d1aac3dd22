"""Caution: who guessed wrong guesses less, and less often; who guessed right guesses more.

    a proposal of which n drafts were right     the next has up to 2n + 1
    nothing right, for the z-th time in a row   the next 2ᶻ - 1 steps, at most 31, have none

A text that does not repeat soon costs one draft in 32 steps, one that begins to is back at full
length in as many steps as its length has bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from ferryman.schedule.drafting import Proposals

LONGEST_REST = 32


class Cautious:
    """Somebody's proposals, cut and spaced by how the last ones went."""

    def __init__(self, proposals: Proposals) -> None:
        self._proposals = proposals
        self._allowed = 1 << 30
        self._rest = 0
        self._misses = 0
        self._proposed_behind = -1

    def propose(self, drawn: Sequence[int], most: int) -> Sequence[int]:
        if self._proposed_behind >= 0:
            self._learn(len(drawn) - self._proposed_behind - 1)
        self._proposed_behind = -1
        if self._rest:
            self._rest -= 1
            return ()
        drafts = self._proposals.propose(drawn, min(most, self._allowed))
        if drafts:
            self._proposed_behind = len(drawn)
        return drafts

    def _learn(self, num_right: int) -> None:
        self._allowed = 2 * num_right + 1
        self._misses = 0 if num_right else self._misses + 1
        self._rest = min(1 << self._misses, LONGEST_REST) - 1
