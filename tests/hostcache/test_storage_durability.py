"""A named extent is on the disk: its bytes before its name, and its name before success."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.hostcache.stored import opened, prompt_with, read_all
from tests.tiers.state_shapes import chain, manifest_of

from ferryman.cache.manifest import Kind

HYBRID = manifest_of(Kind.FULL, Kind.RECURRENT)
PROMPT = prompt_with(HYBRID, chain(1, 2, 3), snapshots=[2])


@dataclass
class DiskAfterPowerCut:
    """The content of a disk after a power cut: synced bytes, under names in a synced folder."""

    root: Path
    synced: dict[int, bytes] = field(default_factory=dict)  # by inode
    named: dict[str, bytes] = field(default_factory=dict)

    def sync(self, fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if not path.is_dir():
            self.synced[os.fstat(fd).st_ino] = path.read_bytes()
            return
        for found in path.glob("*.extent"):
            self.named[found.name] = self.synced.get(found.stat().st_ino, b"")


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskAfterPowerCut:
    found, sync = DiskAfterPowerCut(tmp_path / "storage"), os.fsync

    def fsync(fd: int) -> None:
        sync(fd)
        found.sync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


async def test_what_is_stored_outlives_a_power_cut(disk: DiskAfterPowerCut, tmp_path: Path) -> None:
    async with opened(disk.root) as storage:
        storage.attach(HYBRID)
        assert (await storage.store(PROMPT.keys, PROMPT.offers())).num_stored == 4
        at_success = dict(disk.named)
    survived = tmp_path / "survived"
    survived.mkdir(mode=0o700)
    for name, content in at_success.items():
        (survived / name).write_bytes(content)
    async with opened(survived) as storage:
        storage.attach(HYBRID)
        assert await read_all(storage, PROMPT) == PROMPT.units


async def test_no_name_is_given_to_bytes_that_are_not_on_the_disk(
    disk: DiskAfterPowerCut, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A journal may keep a rename whose bytes are lost: the reader would find zeros."""
    renamed: list[bool] = []
    rename: Callable[[Path, Any], Path] = Path.rename

    def watched(path: Path, target: Any) -> Path:
        if Path(target).suffix == ".extent":
            synced = disk.synced.get(path.stat().st_ino)
            renamed.append(synced == path.read_bytes())
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", watched)
    async with opened(disk.root) as storage:
        storage.attach(HYBRID)
        assert (await storage.store(PROMPT.keys, PROMPT.offers())).num_stored == 4
    assert renamed == [True]
