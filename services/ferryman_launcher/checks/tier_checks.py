"""Checks of a cluster's tiers that need no process of it."""

from __future__ import annotations

import os
from pathlib import Path

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.errors import ConfigError
from ferryman.settings.cluster import SPARE_SHARE, TierOptions, shared_memory_bytes
from ferryman.settings.declaration import size_text
from ferryman.tiers.layout import SNAPSHOT_SHARE, split_arena
from ferryman.wire.hostcache.arena import SHARED_MEMORY

LEAST_STORAGE_BYTES = 1 << 20


def check_tiers(tiers: TierOptions, num_prefill: int, manifest: StateManifest) -> None:
    """Raises ConfigError for what cannot work; `manifest` says how large units are."""
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


def check_shared_memory(tiers: TierOptions) -> None:
    """Raises ConfigError if the host tier that was asked for has no room."""
    room, asked = shared_memory_bytes() * SPARE_SHARE, size_text(tiers.host_bytes)
    if tiers.host_bytes > room:
        raise ConfigError(f"--host-memory {asked}: {SHARED_MEMORY} has room for {size_text(room)}")


def _check_arena(tiers: TierOptions, manifest: StateManifest) -> None:
    asked = size_text(tiers.host_bytes)
    try:
        split_arena(manifest, tiers.arena_bytes, SNAPSHOT_SHARE)
    except ConfigError:
        raise ConfigError(
            f"--host-memory {asked}: the share of a node does not hold one {_units(manifest)}"
        ) from None


def _check_capacity(tiers: TierOptions, manifest: StateManifest) -> None:
    least = LEAST_STORAGE_BYTES + sum(layout.slot_bytes for layout in manifest.layouts)
    if tiers.node_storage_bytes < least:
        raise ConfigError(
            f"--storage-bytes {size_text(tiers.storage_bytes)}: a node needs {size_text(least)} at "
            f"least, to hold one {_units(manifest)}"
        )


def _units(manifest: StateManifest) -> str:
    """`page (1M) and one snapshot (107.3K)`."""
    words = {Kind.RECURRENT: "snapshot", Kind.FULL: "page", Kind.WINDOW: "window page"}
    sizes = (
        f"{words[layout.kind]} ({size_text(layout.slot_bytes)})" for layout in manifest.layouts
    )
    return " and one ".join(sizes)


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"--storage-dir {folder}: it is no folder") from None
    except OSError as error:
        raise ConfigError(f"--storage-dir {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--storage-dir {folder}: nothing may be written there")
