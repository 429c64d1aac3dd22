"""What a step is, as integers: the only thing the scheduler says to the device.

A plan is frozen and complete. The forward stream runs plans in the order of their `step_id`; the
slot operations of a plan are executed once, whatever happens to the batch afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ferryman.cache.keys import TokenIds
from ferryman.cache.manifest import Kind
from ferryman.cache.units import HostUnit as HostUnit
from ferryman.schedule.request import SamplingParams

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the whole recurrent slot `src` to `dst`: copy-on-write of a snapshot."""

    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Load:
    """Bring a host unit into device slot `dst` of the unit's kind, verifying its digest."""

    request_id: str
    unit: HostUnit
    dst: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Freeze the recurrent state at `position` of the request whose working slot is `src`."""

    src: int
    dst: int
    position: int


@dataclass(frozen=True, slots=True)
class RowSeed:
    """Token ids that a row's history starts with, when no forward of this row computes them."""

    row: int
    token_ids: TokenIds


@dataclass(frozen=True, slots=True)
class SlotOps:
    """What a step does to slots besides its forward.

    Prologue, in this order: loads, copies, clears, seeds, saves. Epilogue: snapshots. (In a prefill
    step the scan itself writes snapshots, see `Chunk.snapshots`; these are of decode steps.)
    `saves` freeze states as they stand before the forward: those that verification ended on.
    """

    loads: tuple[Load, ...] = ()
    copies: tuple[Copy, ...] = ()
    clears: tuple[int, ...] = ()
    seeds: tuple[RowSeed, ...] = ()
    saves: tuple[Snapshot, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()


class Draw(NamedTuple):
    """How one token is drawn: for the token at `position` (absolute) of the request in `row`.

    `prompt_len` splits the row's history into prompt and output for the penalties.
    """

    row: int
    position: int
    prompt_len: int
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part [start, end) of a request's tokens that one prefill step computes.

    `token_ids` [end - start]; `snapshots` lie in (start, end] on the page grid and are written by
    the scan. `draws` is empty unless the chunk ends the prompt, and then holds one draw.
    """

    request_id: str
    row: int
    start: int
    end: int
    token_ids: TokenIds
    working_slot: int
    snapshots: tuple[Snapshot, ...]
    draws: tuple[Draw, ...]


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """Chunks of several requests, flattened into one ragged batch.

    `page_tables[kind]` [chunks, pages] names the slot of every page up to the chunk's end; unused
    entries are -1. FULL covers [0, end); WINDOW entries behind the window are -1.
    """

    step_id: int
    ops: SlotOps
    chunks: tuple[Chunk, ...]
    page_tables: Mapping[Kind, Ints]

    @property
    def draws(self) -> tuple[Draw, ...]:
        return tuple(draw for chunk in self.chunks for draw in chunk.draws)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One token of each running request, and the drafts behind it that are to be verified.

    Token i is consumed at `positions[i]` of `rows[i]`. Tokens lie wave after wave: first the first
    token of each of `request_ids`, then the second ones of those that have one, in the same order;
    `waves` are the sizes, which never grow, so request i is the i-th of every wave that it is in.

    The first wave is read on the device from the rows' histories, where the step before it (or the
    prologue's seed) wrote it; `drafts` are the token ids of the later ones, or ON_DEVICE for those
    that a draft model names. Tokens are drawn behind every position, drafts or not.
    `rows`, `positions`, `read_slots`, `write_slots` are [tokens]; `page_tables` [tokens, pages] as
    in PrefillStep. The recurrent state before a token is read at its `read_slots` and the one
    behind it written at its `write_slots`; they are equal where nothing is a draft.
    """

    step_id: int
    ops: SlotOps
    request_ids: tuple[str, ...]
    rows: Ints
    positions: Ints
    read_slots: Ints
    write_slots: Ints
    waves: tuple[int, ...]
    page_tables: Mapping[Kind, Ints]
    draws: tuple[Draw, ...]
    drafts: tuple[int, ...] = ()

    def num_drafts(self, index: int) -> int:
        """How many of request `index` this step verifies."""
        return sum(index < size for size in self.waves[1:])

    def tokens_of(self, index: int) -> list[int]:
        """Indices of the tokens of request `index`, in order."""
        firsts = accumulate(self.waves, initial=0)
        return [
            first + index for first, size in zip(firsts, self.waves, strict=False) if index < size
        ]


StepPlan = PrefillStep | DecodeStep


@dataclass(frozen=True, slots=True)
class Sampled:
    """One drawn token; `logprobs` maps token id to natural log probability (empty: not asked)."""

    token_id: int
    logprobs: Mapping[int, float]


class LoadReport(NamedTuple):
    """What the loads of a step brought: verified bytes, and the seconds spent copying them."""

    num_bytes: int = 0
    seconds: float = 0.0


NOTHING_LOADED = LoadReport()


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What came back: one `Sampled` per draw of the plan, in order, and the loads that failed.

    A request in `corrupt` got bytes from a tier that were not the bytes written; whatever this
    step computed for it is void. `forward_seconds` are without the loads, which `loaded` tells.
    `drafts` are the tokens behind the first wave as they were consumed, wherever they came from.
    """

    step_id: int
    sampled: tuple[Sampled, ...]
    corrupt: tuple[str, ...] = ()
    forward_seconds: float = 0.0
    loaded: LoadReport = NOTHING_LOADED
    drafts: tuple[int, ...] = ()
