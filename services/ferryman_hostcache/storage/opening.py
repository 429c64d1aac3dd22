"""The one door to a storage tier: a folder's, or none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from ferryman_hostcache.storage.folder import Folder
from ferryman_hostcache.storage.folder_storage import Storage, limits_of
from ferryman_hostcache.storage.no_storage import NoStorage
from ferryman_hostcache.storage.remembered import restored
from ferryman_hostcache.storage.scan import scan
from ferryman_hostcache.storage.settings import StorageSettings
from ferryman_hostcache.storage.tier import StorageTier


@asynccontextmanager
async def open_storage(
    settings: StorageSettings, *, clock: Callable[[], float]
) -> AsyncIterator[StorageTier]:
    """A storage tier for the length of a block; nothing is visible before `attach`.

    Raises ConfigError when the folder cannot be used or belongs to another process.
    """
    if not settings.folder:
        yield NoStorage()
        return
    folder = await asyncio.to_thread(Folder, Path(settings.folder))
    scanned = await asyncio.to_thread(scan, folder, settings.scan_seconds, clock)
    prepared = await asyncio.to_thread(restored, folder, scanned, limits_of(settings), clock())
    storage = Storage(folder, scanned, prepared, settings, clock)
    try:
        yield storage
    finally:
        await asyncio.to_thread(storage.close)
