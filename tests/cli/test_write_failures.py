"""A full disk below logs and the cluster's file: said once, and written later."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.skipped_time import skipped_time
from tests.small_disk import fill_disk, small_disk

from ferryman.errors import ConfigError
from ferryman.runtime.life import alongside
from ferryman_cli.up_display import print_line
from ferryman_launcher.state_folder import (
    RETRY_SECONDS,
    ClusterFileWriter,
    RunningCluster,
    StateFolder,
    running_cluster,
)
from ferryman_launcher.write_failures import ChildLog, WriteFailures

CLUSTER = RunningCluster("http://h:1", "h:2", "nats", "redis", "local", "demo", os.getpid())
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fill(folder: StateFolder) -> Path:
    """Lets each write of the cluster's file meet a full disk; returns what to remove for room."""
    draft = folder.path / "cluster.json.new"
    draft.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        folder.write(CLUSTER)
    return draft


class ChangingCluster:
    """A cluster that changes, and its file."""

    def __init__(self, path: Path) -> None:
        self.folder, self.said, self.value = StateFolder(path), list[str](), CLUSTER
        failures = WriteFailures(self.said.append)
        self.file = ClusterFileWriter(self.folder, lambda: self.value, failures)

    def change(self, name: str) -> None:
        self.value = replace(self.value, down={name: "died"})
        self.file.changed()

    @property
    def written(self) -> RunningCluster:
        return running_cluster(self.folder.path)


async def test_the_file_of_a_cluster_is_written_when_the_disk_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, time = ChangingCluster(tmp_path), skipped_time(monkeypatch)
    cluster.file.write_first()
    draft = fill(cluster.folder)
    async with alongside(cluster.file.run()):
        for name in ("one", "two", "three"):
            cluster.change(name)
            await time.skip(RETRY_SECONDS)
        assert cluster.written == CLUSTER, "readers have the older one"
        assert len(cluster.said) == 1
        assert "cluster.json cannot be written: No space left on device" in cluster.said[0]
        draft.unlink()
        await time.skip(RETRY_SECONDS)
        assert cluster.written.down == {"three": "died"}
        assert "can be written again" in cluster.said[1]
        cluster.change("four")
        await time.skip(0)
        assert cluster.written.down == {"four": "died"}
    assert len(cluster.said) == 2


def test_a_disk_that_fills_up_later_has_room_for_the_file_of_each_change(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 512) as disk:
        cluster = ChangingCluster(disk)
        cluster.file.write_first()
        filler = fill_disk(disk)
        with pytest.raises(OSError, match="No space left"):
            (disk / "any").write_bytes(b"one byte")
        for name in ("one", "two", "three"):
            cluster.value = replace(CLUSTER, down={name: "died"})
            cluster.folder.write(cluster.value)
            assert cluster.written.down == {name: "died"}
        filler.unlink()
        cluster.folder.forget()
        left = {path.name for path in disk.iterdir() if path.is_file()}
        assert left <= {"any"}


def test_a_cluster_does_not_start_on_a_full_disk_and_says_so(tmp_path: Path) -> None:
    cluster = ChangingCluster(tmp_path)
    fill(cluster.folder)
    with pytest.raises(ConfigError, match=r"--state-dir .*: No space left on device"):
        cluster.file.write_first()
    assert cluster.said == []


def test_of_many_files_that_cannot_be_written_one_is_named(tmp_path: Path) -> None:
    said: list[str] = []
    failures = WriteFailures(said.append)
    for name in ("one", "two", "one"):
        failures.failed(tmp_path / name, FULL)
    assert len(said) == 1
    failures.written(tmp_path / "three")
    failures.written(tmp_path / "one")
    assert len(said) == 1, "the second still fails"
    failures.written(tmp_path / "two")
    assert len(said) == 2
    failures.failed(tmp_path / "one", FULL)
    assert len(said) == 3, "it is full anew"


def test_a_log_on_a_full_disk_drops_lines_and_has_no_last_ones(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "one.log"
    path.symlink_to("/dev/full")
    log = ChildLog(path, WriteFailures(said.append))
    for _ in range(3):
        log.write(b"lost\n" * 10_000)
    log.close()
    assert len(said) == 1
    assert "one.log cannot be written: No space left on device" in said[0]


def test_the_last_lines_are_those_of_this_life(tmp_path: Path) -> None:
    path = tmp_path / "one.log"
    path.write_text("of an earlier life\n")
    log = ChildLog(path, WriteFailures(print))
    assert log.last_lines(3, 4096) == []
    log.write(b"first\nsecond\nthird\nfourth\n")
    assert log.last_lines(3, 4096) == ["second", "third", "fourth"]
    path.unlink()
    assert log.last_lines(3, 4096) == [], "somebody deleted it"
    log.close()


def test_an_output_on_a_full_disk_loses_the_line_alone() -> None:
    with Path("/dev/full").open("w") as out:
        with pytest.raises(OSError, match="No space left"):
            print("the fault takes effect", file=out, flush=True)
        print_line(json.dumps({"event": "loading"}), out)
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # or its close would raise


async def test_no_change_writes_nothing(tmp_path: Path) -> None:
    cluster = ChangingCluster(tmp_path)
    async with alongside(cluster.file.run()):
        await asyncio.sleep(0)
    assert not cluster.folder.cluster_file.exists()
