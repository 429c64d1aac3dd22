"""Drives a model as the engine would, with nothing in between: slots drawn at random, by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.engine.slabs import Slabs
from ferryman.model.batch import DecodeBatch, PrefillBatch
from ferryman.model.decoder import Model
from ferryman.model.state import ModelState, state_views

NUM_PAGES = 320
NUM_RECURRENT = 48


@dataclass(slots=True)
class Lane:
    """One request: its pages in order, its working slot, the position it stands at."""

    working_slot: int
    pages: list[int] = field(default_factory=list)
    position: int = 0


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
        self.slabs = Slabs.allocate(
            model.manifest, {Kind.FULL: NUM_PAGES, Kind.RECURRENT: NUM_RECURRENT}, "cpu"
        )
        self.state: ModelState = state_views(model.manifest, self.slabs.tensors)
        rng = random.Random(seed)
        self.free_pages = rng.sample(range(NUM_PAGES), NUM_PAGES)
        self.free_slots = rng.sample(range(NUM_RECURRENT), NUM_RECURRENT)

    def start(self) -> Lane:
        """A sequence at position 0, its working slot cleared."""
        slot = self.free_slots.pop()
        self._recurrent[slot] = 0
        return Lane(slot)

    def resume(self, snapshot: int, sequence: Lane, position: int) -> Lane:
        """A new sequence at `position` of another: its pages shared, its snapshot copied."""
        slot = self.free_slots.pop()
        self._recurrent[slot] = self._recurrent[snapshot]
        return Lane(slot, sequence.pages[: position // self._page_size], position)

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
        return list(self.model.prefill(batch, self.state).split_with_sizes(lengths))

    def decode(self, sequences: Sequence[Lane], token_ids: Sequence[int]) -> Tensor:
        """Logits [requests, vocab] behind one more token of each sequence."""
        positions = [sequence.position for sequence in sequences]
        for sequence in sequences:
            self._advance(sequence, 1)
        batch = DecodeBatch(
            token_ids=torch.tensor(list(token_ids)),
            positions=torch.tensor(positions),
            page_tables=self._page_tables(sequences),
            working_slots=torch.tensor([sequence.working_slot for sequence in sequences]),
        )
        return self.model.decode(batch, self.state)

    @property
    def _page_size(self) -> int:
        return self.model.manifest.page_size

    @property
    def _recurrent(self) -> Tensor:
        return self.slabs.by_kind[Kind.RECURRENT].tensor

    def _advance(self, sequence: Lane, num_tokens: int) -> None:
        sequence.position += num_tokens
        while len(sequence.pages) * self._page_size < sequence.position:
            sequence.pages.append(self.free_pages.pop())

    def _page_tables(self, sequences: Sequence[Lane]) -> dict[Kind, Tensor]:
        widest = max(len(sequence.pages) for sequence in sequences)
        rows = [s.pages + [-1] * (widest - len(s.pages)) for s in sequences]
        return {Kind.FULL: torch.tensor(rows)}
