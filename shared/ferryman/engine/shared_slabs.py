"""Slabs of another rank, mapped by rank 0: what is written here is there.

Processors share memory without a name, which ends with the last process that maps it; cards share
by CUDA's handles. Both travel over the connection between the two ranks.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle

import torch
import torch.multiprocessing  # teaches ForkingPickler what a tensor on a card is
from torch import Tensor

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.engine.slabs import Slab, Slabs, fill_slab


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
    found: dict[Kind, Tensor] = {}
    for kind in manifest.kinds:
        message = connection.recv_bytes()
        if device.type != "cpu":
            found[kind] = pickle.loads(message)
            continue
        num_slots, slot_bytes = json.loads(message)
        file = recv_handle(connection)
        found[kind] = _mapped(kind, file, num_slots, slot_bytes).tensor
        os.close(file)
    return found


def _mapped(kind: Kind, file: int, num_slots: int, slot_bytes: int) -> Slab:
    region = mmap.mmap(file, max(1, num_slots * slot_bytes))
    content = memoryview(region)[: num_slots * slot_bytes]
    if not num_slots:
        return Slab(kind, torch.empty((0, slot_bytes), dtype=torch.uint8), content)
    tensor = torch.frombuffer(content, dtype=torch.uint8).view(num_slots, slot_bytes)
    return Slab(kind, tensor, content)
