"""The model that a folder was last used for: with it, a new life restores before it serves.

Blocking; for threads. Only a hint: `attach` compares digests.
"""

from __future__ import annotations

from collections.abc import Mapping

from ferryman.cache.manifest import StateManifest, manifest_from_json, manifest_to_json
from ferryman.tiers.storage import StorageStore
from ferryman.tiers.storage_values import StorageLimits
from ferryman_hostcache.storage.folder import Folder
from ferryman_hostcache.storage.scan import Scanned

MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 4 << 20


def remember(folder: Folder, manifest: StateManifest) -> None:
    """OSError."""
    folder.check_owned()
    path = folder.path / MANIFEST_NAME
    temporary = path.with_suffix(".new")
    temporary.write_text(manifest_to_json(manifest))
    temporary.rename(path)


def restored(
    folder: Folder, scanned: Scanned, limits: StorageLimits, now: float
) -> Mapping[str, StorageStore]:
    """What the folder holds of the model remembered, by its digest; none if there is no such."""
    try:
        with (folder.path / MANIFEST_NAME).open() as file:
            manifest = manifest_from_json(file.read(MAX_MANIFEST_BYTES))
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    store = StorageStore(manifest, limits)
    store.restore(scanned.extents, now)
    return {manifest.digest: store}
