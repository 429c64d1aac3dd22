"""Snapshot placement: which positions of a prompt deserve a recurrent slot.

the end     the last page end at which a repeat can resume, at most n-1 tokens deep
n itself    where a page ends with the prompt: the next turn resumes there, a page deeper
junctions   where the prompt leaves a path that is known
the grid    every so many tokens, for prompts that will share a stem nobody has seen yet
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Placement(NamedTuple):
    """`grid` is in tokens, 0 for none. `most` bounds the snapshots of one prompt, 0 does not: what
    a path does not keep would be taken from others for nothing."""

    grid: int = 0
    most: int = 0

    def positions(
        self, resumed: int, junction: int, ends: tuple[int, ...], prompt_len: int
    ) -> tuple[int, ...]:
        """Where to freeze the state on the way from `resumed`. `ends` are those of the prompt,
        rising; a junction counts when it lies between `resumed` and the last of them."""
        ends = tuple([end for end in ends if end > resumed])
        if not ends:
            return ()
        first = (junction,) if resumed < junction < ends[0] else ()
        if not self.grid:
            places = (*first, *ends)
        else:
            coarse = range((resumed // self.grid + 1) * self.grid, ends[0], self.grid)
            places = tuple(sorted({*first, *coarse, *ends}))
        if not self.most or len(places) <= self.most:
            return places
        return next(few for few in self.fewer(places, prompt_len) if len(few) <= self.most)

    def fewer(self, places: tuple[int, ...], prompt_len: int) -> Iterator[tuple[int, ...]]:
        """Ever fewer of these positions, the end always among them.

        First goes the prompt's length, which saves one page; then the grid, every second one at a
        time; then the junction.
        """
        if len(places) < 2:
            return
        if places[-1] == prompt_len:
            places = places[:-1]
            yield places
        *before, end = places
        step, last = self.grid, places
        while self.grid and step < end:
            step *= 2
            few = (*(place for place in before if place % self.grid or not place % step), end)
            if few != last:
                yield (last := few)
        if len(last) > 1:
            yield (end,)
