"""A prompt's short chunk, padded to one of a few sizes: its arrays, and as tensors on a card.

    body    token_ids, positions [rows]; pages.KIND [1, pages]; working_slots [1]
            place [2]; runs [rounds, 6]; stores [rounds, 4] (see `ragged.PaddedSpan`)
    tail    the size; behind the body, like all that only the host reads
    rows    [tokens] of the chunk's own tokens: where in the history each is written

The place of the span, the number of its tokens and its snapshots are numbers in the body. So all
chunks of a size launch the same kernels on the same addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.engine.forward.draw_tensors import DrawTensors
from ferryman.engine.forward.packed_step import Arrays, StepViews
from ferryman.engine.forward.slot_op_tensors import OpTensors
from ferryman.model.shapes.batch import PrefillBatch
from ferryman.schedule.batch import Chunk, Ints, PrefillStep
from ferryman.schedule.step_sizes import PADDING, TAIL_SNAPSHOTS, TailSize
from ferryman_kernels.ragged import PaddedSpan
from ferryman_kernels.recurrence.selective_scan import rounds_of

ROUNDS = TAIL_SNAPSHOTS + 1
EMPTY_RUN = (1, 0, PADDING, PADDING, PADDING, 0)
NO_STORE = (0, 0, PADDING, PADDING)


@dataclass(frozen=True, slots=True)
class TailPadding:
    """The size to which a chunk is padded; `body` [words] holds all that its forward reads."""

    size: TailSize
    body: Tensor


@dataclass(frozen=True, slots=True)
class TailTensors:
    """A prefill step of one padded chunk. `rows` [tokens] are of its own tokens alone."""

    token_ids: Tensor
    positions: Tensor
    page_tables: Mapping[Kind, Tensor]
    working_slots: Tensor
    place: Tensor
    runs: Tensor
    stores: Tensor
    rows: Tensor
    ops: OpTensors
    draws: DrawTensors
    padding: TailPadding

    def batch(self) -> PrefillBatch:
        """The batch of its rows; the last token is that before the padding."""
        start, count = self.place.unbind()
        return PrefillBatch(
            token_ids=self.token_ids,
            positions=self.positions,
            rows=torch.zeros_like(self.positions),
            spans=PaddedSpan(len(self.positions), start, count, self.runs, self.stores),
            page_tables=self.page_tables,
            working_slots=self.working_slots,
            snapshots=(),
            last_tokens=count[None] - 1,
        )

    def idle(self) -> TailTensors:
        """A chunk of no token, of the same size, in memory of its own: it reads and writes no
        state."""
        body = torch.full_like(self.padding.body, PADDING)
        idle = self._laid_on(body)
        # Padding is a number in each place; these are read as indices whatever the count.
        idle.token_ids.zero_()
        idle.place.zero_()
        idle.runs[:, :2].zero_()
        idle.runs[:, 0].fill_(EMPTY_RUN[0])
        idle.stores[:, :2].zero_()
        return idle

    def _laid_on(self, body: Tensor) -> TailTensors:
        """The same views of `body` as these are of their own."""
        old = self.padding.body
        return replace(
            self,
            token_ids=moved(self.token_ids, old, body),
            positions=moved(self.positions, old, body),
            page_tables={kind: moved(table, old, body) for kind, table in self.page_tables.items()},
            working_slots=moved(self.working_slots, old, body),
            place=moved(self.place, old, body),
            runs=moved(self.runs, old, body),
            stores=moved(self.stores, old, body),
            padding=TailPadding(self.padding.size, body),
        )


def moved(view: Tensor, body: Tensor, other: Tensor) -> Tensor:
    """The same view of `other` as `view` is of `body`."""
    offset = view.storage_offset() - body.storage_offset() + other.storage_offset()
    return other.as_strided(view.shape, view.stride(), offset)


def tail_arrays(plan: PrefillStep, size: TailSize) -> Arrays:
    """The arrays of a step of one chunk that `size` holds."""
    (chunk,) = plan.chunks
    count = chunk.end - chunk.start
    token_ids, positions = np.zeros(size.rows, np.int64), np.full(size.rows, PADDING)
    token_ids[:count] = chunk.token_ids
    positions[:count] = np.arange(chunk.start, chunk.end)
    return {
        "token_ids": token_ids,
        "positions": positions,
        **{f"pages.{kind}": _widened(t, size.pages) for kind, t in plan.page_tables.items()},
        "working_slots": [chunk.working_slot],
        "place": [chunk.start, count],
        "runs": _runs(chunk),
        "stores": _stores(chunk),
        # The body ends here.
        "tail": [size.rows, size.pages],
        "rows": np.full(count, chunk.row),
    }


def _widened(table: Ints, pages: int) -> Ints:
    return np.pad(table, ((0, 0), (0, pages - table.shape[1])), constant_values=PADDING)


def _runs(chunk: Chunk) -> Ints:
    snapshots = [(0, snapshot.position, snapshot.dst) for snapshot in chunk.snapshots]
    runs = np.tile(np.array(EMPTY_RUN, np.int64), (ROUNDS, 1))
    for run, ((first, count, _, copy),) in zip(
        runs, rounds_of(((chunk.start, chunk.end),), snapshots), strict=False
    ):
        run[:5] = first, count, chunk.working_slot, chunk.working_slot, copy
    return runs


def _stores(chunk: Chunk) -> Ints:
    """The snapshots, and the last one: the state after the chunk, in its own slot."""
    stores = np.tile(np.array(NO_STORE, np.int64), (ROUNDS, 1))
    for store, snapshot in zip(stores, chunk.snapshots, strict=False):
        store[2:] = snapshot.position - chunk.start, snapshot.dst
    stores[-1, 2] = chunk.end - chunk.start
    return stores


def unpack_tail(views: StepViews, ops: OpTensors, draws: DrawTensors) -> TailTensors:
    """The padded chunk of a packed step. Copies nothing."""
    size = TailSize(*views.on_host("tail").tolist())
    return TailTensors(
        token_ids=views["token_ids"],
        positions=views["positions"],
        page_tables=views.by_kind("pages"),
        working_slots=views["working_slots"],
        place=views["place"],
        runs=views["runs"],
        stores=views["stores"],
        rows=views["rows"],
        ops=ops,
        draws=draws,
        padding=TailPadding(size, views.before("tail")),
    )
