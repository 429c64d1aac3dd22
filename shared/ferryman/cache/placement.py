"""Snapshot placement: the positions of a prompt that deserve a recurrent slot.

the end     the last page end at which a repeat can resume, at most n-1 tokens deep
n itself    if a page ends with the prompt: the next turn resumes there, one page deeper
junctions   where the prompt leaves a known path
forks       where others are likely to leave it, as the router says: after tools and system messages
the grid    every `grid` tokens, for later prompts that share a beginning not seen twice yet

SGLang calls a snapshot a Mamba checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

# The pages that a likely fork has to save: a slot holds the state of all recurrent layers, and is
# hundreds of pages of some models.
FORK_PAGES = 4


class Placement(NamedTuple):
    """Rules of placement. `grid` is in tokens, 0 for none. `most` bounds the snapshots of one
    prompt (0: no bound): a path keeps no more, so further ones would evict others for nothing.
    `gain` is how many tokens a likely fork has to save to be worth one."""

    grid: int = 0
    most: int = 0
    gain: int = 0

    def worthwhile(self, resumed: int, forks: Iterable[int]) -> tuple[int, ...]:
        """The forks that save at least `gain` tokens: each is so far behind the one before it, or
        behind the point at which the prompt resumes."""
        kept, last = list[int](), resumed
        for fork in sorted(forks):
            if fork - last >= max(1, self.gain):
                kept.append(fork)
                last = fork
        return tuple(kept)

    def positions(
        self, resumed: int, forks: Iterable[int], ends: tuple[int, ...], prompt_len: int
    ) -> tuple[int, ...]:
        """The positions at which to freeze the state on the way from `resumed`. `ends` are those of
        the prompt, rising; `forks`, a junction among them, count if they lie between `resumed` and
        the first of them."""
        ends = tuple([end for end in ends if end > resumed])
        if not ends:
            return ()
        between = {fork for fork in forks if resumed < fork < ends[0]}
        if self.grid:
            between.update(range((resumed // self.grid + 1) * self.grid, ends[0], self.grid))
        places = (*sorted(between), *ends)
        if not self.most or len(places) <= self.most:
            return places
        return next(few for few in self.fewer(places, prompt_len) if len(few) <= self.most)

    def fewer(self, places: tuple[int, ...], prompt_len: int) -> Iterator[tuple[int, ...]]:
        """Smaller and smaller subsets of these positions; each contains the end.

        First the prompt's length is removed, which saves one page; then the grid, every second
        point at a time; then the forks, the deepest first.
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
        for left in range(len(last) - 2, -1, -1):
            yield (*last[:left], end)
