"""The slabs of a worker's ranks, as rank 0 sees them: it maps those of the other ranks, and reads
and writes the slots that they share.

Processors share memory without a name, which ends with the last process that maps it; cards share
by CUDA's handles. Both travel over the connection between two ranks. Each slot is the whole
model's: reading gathers, writing scatters (`cache/shards.py`). The writes of a rank to its share
are visible when it has answered its step, and writes of rank 0 are visible before the next command
is sent.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import threading
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle

import numpy as np
import torch
import torch.multiprocessing  # teaches ForkingPickler what a tensor on a card is
from torch import Tensor

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.shards import ReshardPlan, ShardRun
from ferryman.cache.slots import SlotPart
from ferryman.engine.memory.pinned_pieces import LEAVING_BYTES, TakePiece
from ferryman.engine.memory.slabs import Slab, Slabs, fill_slab
from ferryman.engine.memory.transfer import (
    LANDING_BYTES,
    Landed,
    check_digest,
    check_fits,
    check_size,
    copied,
    digest_of,
    ignored,
    stored,
)


def allocate_shared(
    manifest: StateManifest,
    num_slots: Mapping[Kind, int],
    device: torch.device,
    connection: Connection,
) -> Slabs:
    """Slabs for every kind of `manifest`, which the other end of `connection` maps as well."""
    if device.type != "cpu":
        slabs = Slabs.allocate(manifest, num_slots, device)
        for tensor in slabs.tensors.values():
            connection.send_bytes(ForkingPickler.dumps(tensor))
        return slabs
    by_kind = {}
    for kind in manifest.kinds:
        layout = manifest.layout(kind)
        file = os.memfd_create(f"ferryman-{kind}")
        os.ftruncate(file, max(1, num_slots[kind] * layout.slot_bytes))
        slab = _mapped(kind, file, num_slots[kind], layout.slot_bytes)
        fill_slab(slab.tensor, layout)
        connection.send_bytes(json.dumps([num_slots[kind], layout.slot_bytes]).encode())
        send_handle(connection, file, None)
        os.close(file)
        by_kind[kind] = slab
    return Slabs(by_kind)


def map_shared(
    manifest: StateManifest, device: torch.device, connection: Connection
) -> Mapping[Kind, Tensor]:
    """The slabs that `allocate_shared` makes at the other end of `connection`."""
    slabs: dict[Kind, Tensor] = {}
    for kind in manifest.kinds:
        message = connection.recv_bytes()
        if device.type != "cpu":
            slabs[kind] = pickle.loads(message)
            continue
        num_slots, slot_bytes = json.loads(message)
        file = recv_handle(connection)
        slabs[kind] = _mapped(kind, file, num_slots, slot_bytes).tensor
        os.close(file)
    return slabs


def _mapped(kind: Kind, file: int, num_slots: int, slot_bytes: int) -> Slab:
    region = mmap.mmap(file, max(1, num_slots * slot_bytes))
    content = memoryview(region)[: num_slots * slot_bytes]
    if not num_slots:
        return Slab(kind, torch.empty((0, slot_bytes), dtype=torch.uint8), content)
    tensor = torch.frombuffer(content, dtype=torch.uint8).view(num_slots, slot_bytes)
    return Slab(kind, tensor, content)


class ShardedTransfer:
    """`slabs[rank][kind]` belong to the ranks; `recuts[kind]` is how they make up a slot."""

    is_in_place = False

    def __init__(
        self, recuts: Mapping[Kind, ReshardPlan], slabs: Sequence[Mapping[Kind, Tensor]]
    ) -> None:
        self._recuts = recuts
        self._slabs = slabs
        self._writing = threading.Lock()
        self._landing = torch.empty(0, dtype=torch.uint8)

    def read(self, kind: Kind, slot: int) -> memoryview:
        """A copy of the slot's bytes; zero if the layout has none."""
        return memoryview(self._gathered(kind, slot).numpy().data)

    def read_parts(self, parts: Sequence[SlotPart], take: TakePiece) -> None:
        piece = torch.empty(LEAVING_BYTES, dtype=torch.uint8)
        for number, part in enumerate(parts):
            for begin in range(part.begin, part.end, LEAVING_BYTES):
                content = piece[: min(LEAVING_BYTES, part.end - begin)].zero_()
                self._gather(part.kind, part.slot, begin, content)
                take(number, begin - part.begin, memoryview(content.numpy().data))

    def write(
        self,
        kind: Kind,
        slot: int,
        offset: int,
        content: bytes | memoryview,
        landed: Landed = ignored,
    ) -> None:
        cut, shares = self._recuts[kind], self._shares(kind, slot)
        check_fits(kind, offset, len(content), cut.slot_bytes)
        arrived = np.frombuffer(content, np.uint8)
        with self._writing:
            if not len(self._landing):
                self._landing = torch.empty(LANDING_BYTES, dtype=torch.uint8)
            for begin in range(0, len(arrived), LANDING_BYTES):
                # A copy, because a writer may change lent memory between the ranks and the digest.
                piece = self._landing[: len(arrived) - begin]
                np.copyto(piece.numpy(), arrived[begin : begin + len(piece)])
                at = offset + begin
                _scatter(shares, cut.scattered_within(at, at + len(piece)), piece, at)
                landed(memoryview(piece.numpy().data))

    def digest(self, kind: Kind, slot: int) -> bytes:
        """The digest of the slot's bytes. If another rank keeps other bytes than the first one
        that keeps them, it is of these too, and so of no slot."""
        cut, shares = self._recuts[kind], self._shares(kind, slot)
        whole = self._gathered(kind, slot)
        repeated = ((run, _part(shares, run).cpu()) for run in cut.repeated)
        others = [part for run, part in repeated if not part.equal(whole[run.offset : run.end])]
        return digest_of(memoryview(torch.cat([whole, *others]).numpy().data))

    def store_unit(self, kind: Kind, slot: int, arena: memoryview) -> bytes:
        check_size(kind, len(arena), self._recuts[kind].slot_bytes)
        return stored(self, kind, slot, arena)

    def load_unit(self, kind: Kind, slot: int, arena: memoryview, digest: bytes) -> None:
        """Verified in private memory: bytes with another digest never reach a slot."""
        cut, shares = self._recuts[kind], self._shares(kind, slot)
        check_size(kind, len(arena), cut.slot_bytes)
        arrived = torch.empty(cut.slot_bytes, dtype=torch.uint8)
        check_digest(kind, slot, copied(memoryview(arrived.numpy().data), arena), digest)
        _scatter(shares, cut.scattered, arrived, 0)

    def _gathered(self, kind: Kind, slot: int) -> Tensor:
        whole = torch.zeros(self._recuts[kind].slot_bytes, dtype=torch.uint8)
        self._gather(kind, slot, 0, whole)
        return whole

    def _gather(self, kind: Kind, slot: int, begin: int, content: Tensor) -> None:
        """Fills `content` with the slot's bytes from `begin` on; padding is left alone."""
        shares = self._shares(kind, slot)
        for run in self._recuts[kind].gathered_within(begin, begin + len(content)):
            content[run.offset - begin : run.end - begin].copy_(_part(shares, run))

    def _shares(self, kind: Kind, slot: int) -> list[Tensor]:
        """The slot's bytes at each rank."""
        num_slots = self._slabs[0][kind].shape[0]
        if not 0 <= slot < num_slots:
            raise IndexError(f"the {kind} slabs have no slot {slot} of {num_slots}")
        return [slabs[kind][slot] for slabs in self._slabs]


def _part(shares: Sequence[Tensor], run: ShardRun) -> Tensor:
    return shares[run.rank][run.rank_offset : run.rank_offset + run.num_bytes]


def _scatter(shares: Sequence[Tensor], runs: Iterable[ShardRun], content: Tensor, at: int) -> None:
    """`content` are the bytes of a whole slot from `at` on."""
    for run in runs:
        _part(shares, run).copy_(content[run.offset - at : run.end - at])
