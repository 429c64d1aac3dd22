"""The sizes of steps on a card: a step is padded to the next larger one.

A graph replays a step of one size, and kernels are compiled by their arguments: so there are few
sizes. Padding is a token at position -1, which reads nothing and writes nothing.

    tokens     wave after wave, each as wide as the size says
               [known, known, known, -][draft, draft, -, -][draft, -, -, -]
    pages      the width of every page table

A prompt's chunk of few tokens is padded likewise, behind its tokens. Longer ones, and steps of
several prompts, are as large as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ferryman.schedule.batch import AuditStep, DecodeStep, Ints, PrefillStep

SMALL = (1, 2, 4, 8)
STRIDE = 8
"""Requests from one size to the next, beyond the small ones."""

LEAST_TOKENS = 1024
"""The reach of the narrowest page tables. The next ones are twice as wide."""

ALIGNED_PAGES = 16
"""Triton compiles a stride that 16 divides for itself: so all widths are such strides."""

TAIL_ROWS = (16, 64, 256)
"""The rows of padded chunks. Longer ones are as long as they are."""

TAIL_SNAPSHOTS = 2
"""The most snapshots in a padded chunk: one more is one more launch a recurrent layer, for all."""

PADDING = -1

RECORDING_BYTES = 64 << 20
"""The most for the tensors of all recorded steps on a processor, which has no such sizes."""


@dataclass(frozen=True, slots=True)
class DecodeSize:
    """A decode step of `waves` waves of `requests` tokens, and page tables of `pages` pages."""

    requests: int
    waves: int
    pages: int

    @property
    def num_tokens(self) -> int:
        return self.requests * self.waves

    def kept(self, wave_sizes: tuple[int, ...]) -> Ints:
        """The places of a step's tokens among all, padding included."""
        firsts = range(0, self.num_tokens, self.requests)
        waves = [first + np.arange(n) for first, n in zip(firsts, wave_sizes, strict=False)]
        return np.concatenate(waves, dtype=np.int64)

    def padded(self, tokens: Ints, kept: Ints) -> Ints:
        """An array [tokens, …] with padding between; every table has the width of the size."""
        wide = (self.pages,) if tokens.ndim == 2 else ()
        padded = np.full((self.num_tokens, *wide), PADDING, np.int64)
        if tokens.ndim == 2:
            padded[kept, : tokens.shape[1]] = tokens
        else:
            padded[kept] = tokens
        return padded


@dataclass(frozen=True, slots=True)
class TailSize:
    """A chunk of one prompt in `rows` rows, and page tables of `pages` pages."""

    rows: int
    pages: int


@dataclass(frozen=True, slots=True)
class StepSizes:
    """All sizes of a worker: of up to `max_requests` requests with `num_drafts` drafts each, none
    if it never decodes, and tables of up to `max_pages` pages of `page_size` tokens. Chunks are
    padded to one of `tail_rows`."""

    max_requests: int
    max_pages: int
    page_size: int
    num_drafts: int = 0
    tail_rows: tuple[int, ...] = ()

    def of(self, step: DecodeStep) -> DecodeSize:
        """The least size that holds the step. A step that verifies has as many waves as there may
        be: fewer would be a size of their own."""
        waves = 1 + self.num_drafts if len(step.verify_depths) > 1 else 1
        width = max((table.shape[1] for table in step.page_tables.values()), default=0)
        requests = next(n for n in self._requests(waves) if n >= step.verify_depths[0])
        return DecodeSize(requests, waves, next(n for n in self.widths() if n >= width))

    def tail_of(self, step: PrefillStep) -> TailSize | None:
        """The least size that holds a step of one short chunk; None for one that is not padded.

        An audit is not: it computes what a graph has computed, kernel by kernel.
        """
        chunk, *others = step.chunks
        if others or chunk.scores or step.adapters.any() or isinstance(step, AuditStep):
            return None
        if chunk.draws and [draw.position for draw in chunk.draws] != [chunk.end]:
            return None
        if len(chunk.snapshots) > TAIL_SNAPSHOTS:
            return None
        length = chunk.end - chunk.start
        return next((size for size in self.tails() if size.rows >= length), None)

    def tails(self) -> tuple[TailSize, ...]:
        """All sizes of chunks, the shortest first. Of models whose chunks are padded no kernel's
        grid follows from the width of a prompt's table, so it has one."""
        return tuple(TailSize(rows, self.widths()[-1]) for rows in self.tail_rows)

    def each(self) -> Iterator[DecodeSize]:
        """All sizes of decode steps, those with the fewest pages first."""
        for pages in self.widths() if self.max_requests else ():
            for waves in self.wave_counts():
                for requests in self._requests(waves):
                    yield DecodeSize(requests, waves, pages)

    def wave_counts(self) -> tuple[int, ...]:
        return (1, 1 + self.num_drafts) if self.num_drafts else (1,)

    def widths(self) -> tuple[int, ...]:
        """The widths of page tables, in pages."""
        widths = [max(ALIGNED_PAGES, LEAST_TOKENS // self.page_size)]
        while widths[-1] < self.max_pages:
            widths.append(2 * widths[-1])
        return tuple(widths)

    @property
    def max_tokens(self) -> int:
        """The tokens of the largest decode step, padding included; a padded chunk has the logits of
        one."""
        return max(self._requests(waves)[-1] * waves for waves in self.wave_counts())

    def _requests(self, waves: int) -> tuple[int, ...]:
        """Numbers of requests, only even ones for several waves: a wave begins at aligned words."""
        most = -(-self.max_requests // 2) * 2 if self.max_requests > 1 or waves > 1 else 1
        counts = [n for n in (*SMALL, *range(2 * STRIDE, most, STRIDE)) if n < most] + [most]
        return tuple(n for n in counts if waves == 1 or n % 2 == 0)
