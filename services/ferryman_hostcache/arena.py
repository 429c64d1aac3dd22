"""The arena: one file in shared memory that takes memory as its slots are given, and its attached
workers."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from hmac import compare_digest
from pathlib import Path

import xxhash

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.errors import ConfigError, Stale
from ferryman.tiers.layout import ArenaLayout
from ferryman.tiers.values import WorkerLife
from ferryman.wire.hostcache.arena import (
    OWNER_BYTE,
    PROOF_BYTES,
    PROOF_KEY,
    is_locked,
    liveness_byte,
    try_lock,
)

log = logging.getLogger(__name__)

PAGE = mmap.PAGESIZE
STRETCH_BYTES = 2 << 20  # 0.5 ms to take
_NO_MEMORY = frozenset({errno.ENOSPC, errno.ENOMEM})

# The time from the answer to Attach until a worker must hold its lock.
LOCK_GRACE_SECONDS = 30.0
# A caller that shows a role's token may attach as often as it likes, and lock nothing.
MAX_UNLOCKED = 1024


class Arena:
    """The bytes of all host units. `create` makes the file; `remove` unlinks it at the end."""

    def __init__(self, path: Path, fd: int, num_bytes: int, proof: str) -> None:
        self.path, self.num_bytes, self._proof = path, num_bytes, proof
        self._fd = fd
        self._map = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED)
        self._memory = memoryview(self._map)

    @classmethod
    def create(cls, path: Path, num_bytes: int) -> Arena:
        """Takes no memory yet (see `take`), but too little room for all of it is a ConfigError."""
        num_bytes -= num_bytes % PAGE
        _check_room(path.parent, num_bytes)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            assert try_lock(fd, OWNER_BYTE), "a file that is new is locked by nobody"
            proof = secrets.token_bytes(PROOF_BYTES)
            os.ftruncate(fd, num_bytes)
            os.pwrite(fd, proof, num_bytes)
            return cls(path, fd, num_bytes, proof.hex())
        except BaseException:
            path.unlink()
            os.close(fd)
            raise

    def take(self, offset: int, num_bytes: int) -> bool:
        """Takes memory for these bytes before their first use, because too little memory would be a
        SIGBUS then. Returns False, and takes none, if there is too little."""
        try:
            os.posix_fallocate(self._fd, offset, num_bytes)
        except OSError as error:
            if error.errno not in _NO_MEMORY:
                raise
            return False
        return True

    def is_mapped_by(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Whether a call's metadata show that the caller can open the arena."""
        proofs = [value for key, value in metadata if key == PROOF_KEY]
        if len(proofs) != 1 or not isinstance(proofs[0], str):
            return False
        return compare_digest(proofs[0].encode(), self._proof.encode())

    def is_alive(self, worker_index: int) -> bool:
        """Whether that worker maps the arena, by its lock in the kernel."""
        return is_locked(self._fd, liveness_byte(worker_index))

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """The memory of one unit, to read or to write."""
        return self._memory[offset : offset + num_bytes]

    def digest(self, offset: int, num_bytes: int) -> bytes:
        """The digest of the bytes now. Releases the GIL."""
        return xxhash.xxh3_128_digest(self._memory[offset : offset + num_bytes])

    def remove(self) -> None:
        """Unlinks the file; its memory lives until the last worker has unmapped it."""
        with suppress(FileNotFoundError):
            self.path.unlink()
        with suppress(BufferError):
            self._memory.release()
            self._map.close()
        os.close(self._fd)


class ArenaGrowth:
    """Takes memory for the slots of each kind as they are given for the first time, a stretch at
    once. If shared memory has none left, the kind ends at the slots that have theirs."""

    def __init__(self, arena: Arena, layout: ArenaLayout) -> None:
        self._arena, self._layout = arena, layout
        self._num_ready = dict.fromkeys(layout.regions, 0)

    def prepare(self, kind: Kind, slot: int) -> int:
        """Takes memory for `slot` and the rest of a stretch; returns the number of slots, from 0
        on, that have memory."""
        region, begin = self._layout.regions[kind], self._num_ready[kind]
        if slot < begin:
            return begin
        end = min(region.num_slots, slot + max(1, STRETCH_BYTES // region.slot_bytes))
        num_bytes = (end - begin) * region.slot_bytes
        if self._arena.take(region.offset_of(begin), num_bytes):
            self._num_ready[kind] = end
        else:
            message = (
                "%s has no memory left: %d of %d %s slots; lower FERRYMAN_HOST_MEMORY or enlarge it"
            )
            log.warning(message, self._arena.path.parent, begin, region.num_slots, kind)
        return self._num_ready[kind]


def _check_room(folder: Path, num_bytes: int) -> None:
    """Raises ConfigError before any memory is taken, so that a small machine is not filled up."""
    try:
        room = os.statvfs(folder)
    except OSError as error:
        raise ConfigError(f"the arena's folder {folder}: {error.strerror}") from error
    # Behind the units is the proof, on a page of its own.
    if room.f_bavail * room.f_frsize < num_bytes + PAGE:
        raise ConfigError(_too_small(folder, num_bytes))


def _too_small(folder: Path, num_bytes: int) -> str:
    return (
        f"memory_bytes={num_bytes} do not fit {folder}; lower FERRYMAN_HOST_MEMORY or "
        f"enlarge it (docker: --shm-size)"
    )


@dataclass(slots=True)
class _Attached:
    life: WorkerLife
    manifest: StateManifest
    index: int
    since: float
    has_locked: bool = False


class AttachedWorkers:
    """Attached lives by the index of their lock. `is_alive(index)` asks the kernel."""

    def __init__(self, is_alive: Callable[[int], bool]) -> None:
        self._is_alive = is_alive
        self._attached: list[_Attached] = []
        self._num_indices = 0

    def __len__(self) -> int:
        return len(self._attached)

    def attach(self, life: WorkerLife, manifest: StateManifest, now: float) -> int:
        """The index of the byte to lock. A life that attaches again gets a new one. Of too many
        that have locked nothing the oldest is forgotten, and would have to attach again."""
        unlocked = [entry for entry in self._attached if not entry.has_locked]
        if len(unlocked) >= MAX_UNLOCKED:
            self._attached.remove(unlocked[0])
        self._num_indices += 1
        self._attached.append(_Attached(life, manifest, self._num_indices, now))
        return self._num_indices

    def first_manifest(self) -> StateManifest | None:
        """The manifest of the first life that holds its lock; None before any does."""
        return next((e.manifest for e in self._attached if self._is_alive(e.index)), None)

    def refuse(self, manifest: StateManifest) -> None:
        """Lives with this manifest have to attach again."""
        self._attached = [e for e in self._attached if e.manifest.digest != manifest.digest]

    def refuse_others(self, manifest: StateManifest) -> None:
        """Lives with another manifest have to attach again."""
        self._attached = [e for e in self._attached if e.manifest.digest == manifest.digest]

    def living(self, worker_id: str) -> WorkerLife:
        """The life that is calling; Stale unless it has attached and holds its lock."""
        mine = [entry for entry in self._attached if entry.life.worker_id == worker_id]
        for entry in reversed(mine):
            if self._is_alive(entry.index):
                entry.has_locked = True
                return entry.life
        raise Stale(f"{worker_id} maps no arena here; attach again and lock the byte given")

    def sweep(self, now: float) -> tuple[WorkerLife, ...]:
        """Removes and returns the lives that have no mapping left."""
        over = [entry for entry in self._attached if self._is_over(entry, now)]
        self._attached = [entry for entry in self._attached if entry not in over]
        left = {entry.life for entry in self._attached}
        return tuple(dict.fromkeys(entry.life for entry in over if entry.life not in left))

    def _is_over(self, attached: _Attached, now: float) -> bool:
        if self._is_alive(attached.index):
            attached.has_locked = True
            return False
        return attached.has_locked or now - attached.since > LOCK_GRACE_SECONDS
