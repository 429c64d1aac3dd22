"""What a caller of `ferryman up` may choose about the tiers behind the device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.errors import ConfigError
from ferryman.runtime.settings import PREFETCH_THRESHOLD, PrefetchPolicyName, WritePolicyName
from ferryman.tiers.layout import SNAPSHOT_SHARE, split_arena
from ferryman.wire.host_arena import SHARED_MEMORY
from ferryman_cli.sizes import parse_size, size_text

DEFAULT_HOST_BYTES = 256 << 20
DEFAULT_STORAGE_BYTES = 1 << 30
LEAST_STORAGE_BYTES = 1 << 20
STORAGE_NAME = "storage"
_SPARE_SHARE = 2


@dataclass(frozen=True, slots=True)
class TierChoices:
    """Bytes are those of all nodes of this machine together, and of all pools; each node has an
    equal share. `host_bytes` 0 is DEFAULT_HOST_BYTES, or less where shared memory is small.
    `storage_bytes` 0 without a folder is no storage tier."""

    host_bytes: int = 0
    storage_dir: str = ""
    storage_bytes: int = 0
    write_policy: str = "write_through"
    prefetch_policy: str = "timeout"
    prefetch_threshold: int = PREFETCH_THRESHOLD
    num_nodes: int = 1

    @property
    def arena_bytes(self) -> int:
        """Of one node."""
        whole = self.host_bytes or min(DEFAULT_HOST_BYTES, _shared_memory_bytes())
        return whole // self.num_nodes

    @property
    def has_storage(self) -> bool:
        return bool(self.storage_dir or self.storage_bytes)

    @property
    def node_storage_bytes(self) -> int:
        """Of one node; 0 without a storage tier."""
        whole = self.storage_bytes or DEFAULT_STORAGE_BYTES
        return whole // self.num_nodes if self.has_storage else 0

    def storage_folder(self, state_folder: Path, node: str) -> str:
        """Of one node; empty without a storage tier."""
        if not self.has_storage:
            return ""
        folder = Path(self.storage_dir) if self.storage_dir else state_folder / STORAGE_NAME
        return str((folder if self.num_nodes == 1 else folder / node).absolute())

    def nodes(self) -> list[str]:
        """Their names in the index."""
        return ["local"] if self.num_nodes == 1 else list(_numbered(self.num_nodes))


def _numbered(number: int) -> Iterator[str]:
    return (f"node-{i}" for i in range(1, number + 1))


def tier_size(flag: str, text: str) -> int:
    """Bytes; 0 when the flag was not given. Raises ConfigError for what is no size, or nothing."""
    num_bytes = parse_size(flag, text)
    if text and not num_bytes:
        raise ConfigError(f"{flag} {text}: it should be more than nothing, or be left out")
    return num_bytes


def check_tiers(tiers: TierChoices, num_prefill: int, manifest: StateManifest) -> None:
    """Raises ConfigError for what cannot work; `manifest` says how large units are."""
    for flag, word, known in (
        ("--write-policy", tiers.write_policy, get_args(WritePolicyName)),
        ("--prefetch-policy", tiers.prefetch_policy, get_args(PrefetchPolicyName)),
    ):
        if word not in known:
            raise ConfigError(f"{flag} {word}: it should be one of {', '.join(known)}")
    if tiers.num_nodes > num_prefill:
        raise ConfigError(
            f"--nodes {tiers.num_nodes}: each needs a prefill worker, and --prefill is "
            f"{num_prefill}"
        )
    if tiers.host_bytes:
        _check_arena(tiers, manifest)
    if tiers.storage_bytes:
        _check_capacity(tiers, manifest)
    if tiers.storage_dir:
        _check_folder(Path(tiers.storage_dir))


def _check_arena(tiers: TierChoices, manifest: StateManifest) -> None:
    room, asked = _shared_memory_bytes() * _SPARE_SHARE, size_text(tiers.host_bytes)
    if tiers.host_bytes > room:
        raise ConfigError(f"--host-memory {asked}: {SHARED_MEMORY} has room for {size_text(room)}")
    try:
        split_arena(manifest, tiers.arena_bytes, SNAPSHOT_SHARE)
    except ConfigError:
        raise ConfigError(
            f"--host-memory {asked}: the share of a node does not hold one {_units(manifest)}"
        ) from None


def _check_capacity(tiers: TierChoices, manifest: StateManifest) -> None:
    least = LEAST_STORAGE_BYTES + sum(layout.slot_bytes for layout in manifest.layouts)
    if tiers.node_storage_bytes < least:
        raise ConfigError(
            f"--storage-bytes {size_text(tiers.storage_bytes)}: a node needs {size_text(least)} at "
            f"least, to hold one {_units(manifest)}"
        )


def _units(manifest: StateManifest) -> str:
    """`page (1M) and one snapshot (107.3K)`."""
    words = {Kind.RECURRENT: "snapshot", Kind.FULL: "page", Kind.WINDOW: "window page"}
    sizes = (f"{words[each.kind]} ({size_text(each.slot_bytes)})" for each in manifest.layouts)
    return " and one ".join(sizes)


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"--storage-dir {folder}: it is no folder") from None
    except OSError as error:
        raise ConfigError(f"--storage-dir {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--storage-dir {folder}: nothing may be written there")


def _shared_memory_bytes() -> int:
    """A share of what is free there, in whole mebibytes; a container often has little."""
    try:
        room = os.statvfs(SHARED_MEMORY)
    except OSError:
        return DEFAULT_HOST_BYTES
    return max(1, (room.f_bavail * room.f_frsize // _SPARE_SHARE) >> 20) << 20
