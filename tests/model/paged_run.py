"""Drives a model as the engine does, but directly: slots are drawn at random.

A page behind the window is freed at once and poisoned, and other requests take it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.cache.resume import resume_set
from ferryman.engine.memory.slabs import POISON, Slabs
from ferryman.model.layers.decoder import Model
from ferryman.model.shapes.batch import DecodeBatch, PrefillBatch
from ferryman.model.shapes.state import ModelState, state_views

NUM_SLOTS = {Kind.FULL: 320, Kind.WINDOW: 320, Kind.RECURRENT: 48}
NO_SLOT = -1

Pages = dict[Kind, dict[int, int]]


@dataclass(slots=True)
class Lane:
    """One request: its pages by kind and index, its working slot, and its position."""

    working_slot: int
    pages: Pages = field(default_factory=dict)
    position: int = 0
    scratch: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Part:
    """The next tokens of a sequence; `snapshots` maps positions to recurrent slots."""

    sequence: Lane
    token_ids: Sequence[int]
    snapshots: dict[int, int] = field(default_factory=dict)


class PagedRun:
    """A model with slabs of poisoned, scattered slots."""

    def __init__(self, model: Model, seed: int = 0) -> None:
        self.model = model
        self.slabs = Slabs.allocate(model.manifest, NUM_SLOTS, "cpu")
        self.state: ModelState = state_views(model.manifest, self.slabs.tensors)
        rng = random.Random(seed)
        self.free = {kind: rng.sample(range(n), n) for kind, n in NUM_SLOTS.items()}

    @property
    def free_slots(self) -> list[int]:
        """Free recurrent slots."""
        return self.free[Kind.RECURRENT]

    def start(self) -> Lane:
        """A sequence at position 0, its working slot cleared."""
        if Kind.RECURRENT not in self._kinds:
            return Lane(NO_SLOT)
        slot = self.free_slots.pop()
        self._slab(Kind.RECURRENT)[slot] = 0
        return Lane(slot)

    def resume(self, snapshot: int, sequence: Lane, position: int) -> Lane:
        """A new sequence at `position` of another: its pages shared, its snapshot copied."""
        lane = self.start()
        if Kind.RECURRENT in self._kinds:
            recurrent = self._slab(Kind.RECURRENT)
            recurrent[lane.working_slot] = recurrent[snapshot]
        num_pages = position // self._page_size
        lane.pages = {
            kind: {page: slot for page, slot in pages.items() if page < num_pages}
            for kind, pages in sequence.pages.items()
        }
        lane.position = position
        return lane

    def prefill(self, parts: Sequence[Part]) -> list[Tensor]:
        """Logits [tokens, vocab] of each part, at every position."""
        spans = []
        for part in parts:
            start = part.sequence.position
            spans.append((start, start + len(part.token_ids)))
            self._advance(part.sequence, len(part.token_ids))
        lengths = [len(part.token_ids) for part in parts]
        batch = PrefillBatch(
            token_ids=torch.tensor([token for part in parts for token in part.token_ids]),
            positions=torch.cat([torch.arange(*span) for span in spans]),
            rows=torch.arange(len(parts)).repeat_interleave(torch.tensor(lengths)),
            spans=tuple(spans),
            page_tables=self._page_tables([part.sequence for part in parts]),
            working_slots=torch.tensor([part.sequence.working_slot for part in parts]),
            snapshots=tuple(
                (index, position, slot)
                for index, part in enumerate(parts)
                for position, slot in part.snapshots.items()
            ),
            last_tokens=torch.arange(sum(lengths)),
        )
        logits = self.model.prefill(batch, self.state).logits(batch.last_tokens)
        found = list(logits.split_with_sizes(lengths))
        self._slide([part.sequence for part in parts])
        return found

    def decode(self, sequences: Sequence[Lane], token_ids: Sequence[int]) -> Tensor:
        """Logits [requests, vocab] after one more token of each sequence."""
        positions = [sequence.position for sequence in sequences]
        for sequence in sequences:
            self._advance(sequence, 1)
        slots = torch.tensor([sequence.working_slot for sequence in sequences])
        batch = DecodeBatch(
            token_ids=torch.tensor(list(token_ids)),
            positions=torch.tensor(positions),
            page_tables=self._page_tables(sequences),
            read_slots=slots,
            write_slots=slots,
            waves=(len(sequences),),
            rows=torch.arange(len(sequences)),
        )
        found = self.model.decode(batch, self.state)
        self._slide(sequences)
        return found

    def verify(self, sequences: Sequence[Lane], drafts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits [tokens, vocab] after each of several tokens of each sequence, the longest first.

        The state after the first token is in the working slot, each later one in a slot of
        `scratch`; `keep` continues from one of them.
        """
        waves = [[i for i, d in enumerate(drafts) if len(d) > j] for j in range(len(drafts[0]))]
        tokens = [(i, j) for j, wave in enumerate(waves) for i in wave]
        for sequence, more in zip(sequences, drafts, strict=True):
            sequence.scratch = [self.start().working_slot for _ in more[1:]]
        slots = [[s.working_slot, *s.scratch] for s in sequences]
        positions = [sequences[i].position + j for i, j in tokens]
        for sequence, more in zip(sequences, drafts, strict=True):
            self._advance(sequence, len(more))
        tables = self._page_tables(sequences)
        batch = DecodeBatch(
            token_ids=torch.tensor([drafts[i][j] for i, j in tokens]),
            positions=torch.tensor(positions),
            page_tables={k: table[[i for i, _ in tokens]] for k, table in tables.items()},
            read_slots=torch.tensor([slots[i][max(0, j - 1)] for i, j in tokens]),
            write_slots=torch.tensor([slots[i][j] for i, j in tokens]),
            waves=tuple(len(wave) for wave in waves),
            rows=torch.arange(len(tokens)),
        )
        found = self.model.decode(batch, self.state)
        return [
            found[[n for n, (owner, _) in enumerate(tokens) if owner == i]]
            for i in range(len(sequences))
        ]

    def keep(self, sequence: Lane, num_drafted: int, num_kept: int) -> None:
        """Accepts the first `num_kept` of `num_drafted` tokens, and undoes the rest."""
        sequence.position += num_kept - num_drafted
        if num_kept > 1:
            kept = sequence.scratch[num_kept - 2]
            sequence.scratch[num_kept - 2] = sequence.working_slot
            sequence.working_slot = kept
        if Kind.RECURRENT in self._kinds:
            self._slab(Kind.RECURRENT)[sequence.scratch] = POISON
            self.free_slots.extend(sequence.scratch)
        self._slide([sequence])

    @property
    def _page_size(self) -> int:
        return self.model.manifest.page_size

    @property
    def _kinds(self) -> tuple[Kind, ...]:
        return self.model.manifest.kinds

    @property
    def _paged_kinds(self) -> list[Kind]:
        return [kind for kind in self._kinds if kind is not Kind.RECURRENT]

    def _slab(self, kind: Kind) -> Tensor:
        return self.slabs.by_kind[kind].tensor

    def _advance(self, sequence: Lane, num_tokens: int) -> None:
        """Allocates pages of every kind for the next tokens."""
        start, end = sequence.position, sequence.position + num_tokens
        for kind in self._paged_kinds:
            pages = sequence.pages.setdefault(kind, {})
            for page in range(start // self._page_size, -(-end // self._page_size)):
                if page not in pages:
                    pages[page] = self.free[kind].pop(0)
        sequence.position = end

    def _slide(self, sequences: Sequence[Lane]) -> None:
        """Frees the pages that no later query of a sequence reads."""
        if Kind.WINDOW not in self._kinds:
            return
        for sequence in sequences:
            oldest = resume_set(self.model.manifest, sequence.position).window.first
            pages = sequence.pages[Kind.WINDOW]
            for page in [page for page in pages if page < oldest]:
                slot = pages.pop(page)
                self._slab(Kind.WINDOW)[slot] = POISON
                self.free[Kind.WINDOW].append(slot)

    def _page_tables(self, sequences: Sequence[Lane]) -> dict[Kind, Tensor]:
        widest = max(-(-sequence.position // self._page_size) for sequence in sequences)
        return {
            kind: torch.tensor(
                [[s.pages[kind].get(page, NO_SLOT) for page in range(widest)] for s in sequences]
            )
            for kind in self._paged_kinds
        }
