"""Steps written by hand, in as few words as a test needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ferryman.cache.keys import as_token_ids
from ferryman.cache.manifest import Kind
from ferryman.cache.units import HostUnit
from ferryman.schedule.batch import (
    Chunk,
    DecodeStep,
    Ints,
    PrefillStep,
    SampleRequest,
    SlotLoad,
    SlotOps,
    SlotSnapshot,
)
from ferryman.schedule.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
NO_OPS = SlotOps()


@dataclass(frozen=True, slots=True)
class Guest:
    """A request with everything it was given: a row, a working slot, pages."""

    request_id: str
    tokens: Sequence[int]
    row: int
    working_slot: int
    pages: Mapping[Kind, Sequence[int]]
    params: SamplingParams = GREEDY

    def with_pages(self, kind: Kind, pages: Sequence[int]) -> Guest:
        return replace(self, pages={**self.pages, kind: pages})


def full_pages(*slots: int) -> Mapping[Kind, Sequence[int]]:
    return {Kind.FULL: slots}


def draw(guest: Guest, position: int) -> SampleRequest:
    return SampleRequest(guest.row, position, len(guest.tokens), guest.params)


def chunk(guest: Guest, start: int, end: int, snapshots: Sequence[tuple[int, int]] = ()) -> Chunk:
    """Snapshots are pairs (position, slot); the chunk that ends the prompt draws."""
    return Chunk(
        guest.request_id,
        guest.row,
        start,
        end,
        as_token_ids(guest.tokens[start:end]),
        guest.working_slot,
        tuple(SlotSnapshot(guest.working_slot, slot, position) for position, slot in snapshots),
        (draw(guest, end),) if end == len(guest.tokens) else (),
    )


def prefill(
    step_id: int, spans: Sequence[tuple[Guest, int, int]], ops: SlotOps = NO_OPS
) -> PrefillStep:
    chunks = tuple(chunk(guest, start, end) for guest, start, end in spans)
    return PrefillStep(step_id, ops, chunks, tables([guest for guest, _, _ in spans]))


def with_snapshots(step: PrefillStep, *snapshots: tuple[int, int]) -> PrefillStep:
    """The same step, whose first chunk snapshots at these (position, slot)."""
    first = step.chunks[0]
    made = tuple(SlotSnapshot(first.working_slot, slot, position) for position, slot in snapshots)
    return replace(step, chunks=(replace(first, snapshots=made), *step.chunks[1:]))


def decode(step_id: int, places: Sequence[tuple[Guest, int]], ops: SlotOps = NO_OPS) -> DecodeStep:
    """Each guest consumes the token at its position."""
    guests = [guest for guest, _ in places]
    working = np.array([guest.working_slot for guest in guests], np.int64)
    return DecodeStep(
        step_id,
        ops,
        tuple(guest.request_id for guest in guests),
        np.array([guest.row for guest in guests], np.int64),
        np.array([position for _, position in places], np.int64),
        working,
        working,
        (len(places),),
        tables(guests),
        tuple(draw(guest, position + 1) for guest, position in places),
    )


def verify(
    step_id: int,
    guest: Guest,
    position: int,
    drafts: Sequence[int],
    scratch: Sequence[int],
    ops: SlotOps = NO_OPS,
) -> DecodeStep:
    """The guest consumes the token at `position`, and drafts whose states go to `scratch`."""
    num_tokens = 1 + len(drafts)
    states = [guest.working_slot, *scratch[: len(drafts)]]
    return DecodeStep(
        step_id,
        ops,
        (guest.request_id,),
        np.full(num_tokens, guest.row, np.int64),
        np.arange(position, position + num_tokens),
        np.array([states[0], *states[:-1]], np.int64),
        np.array(states, np.int64),
        (1,) * num_tokens,
        tables([guest] * num_tokens),
        tuple(draw(guest, position + 1 + behind) for behind in range(num_tokens)),
        tuple(drafts),
    )


def tables(guests: Sequence[Guest]) -> dict[Kind, Ints]:
    found = {}
    for kind in guests[0].pages:
        longest = max(len(guest.pages[kind]) for guest in guests)
        found[kind] = np.full((len(guests), longest), -1, np.int64)
        for index, guest in enumerate(guests):
            found[kind][index, : len(guest.pages[kind])] = guest.pages[kind]
    return found


def load(
    guest: Guest, kind: Kind, dst: int, offset: int, content: bytes, digest: bytes
) -> SlotLoad:
    unit = HostUnit(kind, 0, bytes(16), offset, len(content), digest)
    return SlotLoad(guest.request_id, unit, dst)
