"""Owners of a prefix that die, and one that only seemed dead: the next owner finds what is whole.

All are real: a process of its own, SIGKILL, SIGSTOP, and a server that holds a put half read.
"""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.hostcache import doomed_owner
from tests.hostcache.stored import (
    Bucket,
    Place,
    content_at,
    extents_at,
    opened,
    read_all,
    spoil_at,
)

from ferryman.tiers.storage_values import StorageFailed, UnitCorrupt
from ferryman_hostcache.storage.factory import StorageTier
from ferryman_hostcache.storage.object_blob_store import TERM_SHIFT

WAIT_SECONDS = 120.0
LEASE_SECONDS = 4.0
MANIFEST = doomed_owner.manifest()
FIRST, SECOND, THIRD = (doomed_owner.prompt(number) for number in (1, 11, 21))


class OwnerProcess:
    """A process that owns a prefix."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert self.hear() == "owner"

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def has_answered(self) -> bool:
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def ask(self, line: str) -> int:
        self.tell(line)
        return int(self.hear())

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait(WAIT_SECONDS) == -signal.SIGKILL

    def pause(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)
        state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state == "T", "it is not paused"

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


@contextmanager
def owner_of(bucket: Bucket) -> Iterator[OwnerProcess]:
    seconds = str(bucket.lease_seconds)
    command = [sys.executable, "-m", doomed_owner.__name__, bucket.url, seconds]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield OwnerProcess(process)
        finally:
            process.kill()


def in_flight(owner: OwnerProcess, bucket: Bucket, line: str) -> None:
    """Has the owner put an object, of which the server takes the first bytes only; again where a
    busy machine kept it from renewing."""
    bucket.faults.is_flowing.clear()
    owner.tell(line)
    end = time.monotonic() + WAIT_SECONDS
    while not bucket.faults.is_under_way.wait(0.05):
        assert time.monotonic() < end, "nothing is under way"
        if owner.has_answered():
            assert owner.hear() == "0", "it stored what was not taken"
            owner.tell(line)


def stored_by(owner: OwnerProcess, line: str) -> None:
    """It stores, again where a busy machine kept it from renewing."""
    while not owner.ask(line):
        pass


def contents(bucket: Bucket) -> dict[str, bytes]:
    return {name: bytes(content_at(bucket, name) or b"") for name in extents_at(bucket)}


async def only_these(storage: StorageTier, *numbers: int) -> None:
    """Exactly these prompts are read, byte for byte, and nothing was damaged."""
    for number in (1, 11, 21, 31):
        prompt = doomed_owner.prompt(number)
        expected = prompt.units if number in numbers else {}
        assert await read_all(storage, prompt) == expected
    told = storage.drain_effects()
    assert not [e for e in told if isinstance(e, UnitCorrupt)]
    assert not [e for e in told if isinstance(e, StorageFailed) and e.operation == "read"]


async def test_a_prefix_of_a_killed_owner_is_taken_over_without_its_half_put_object(
    bucket: Bucket,
) -> None:
    bucket = dataclasses.replace(bucket, lease_seconds=LEASE_SECONDS)
    with owner_of(bucket) as owner:
        stored_by(owner, "store 1")
        in_flight(owner, bucket, "store 11")
        owner.kill()
    bucket.faults.is_flowing.set()
    assert bucket.faults.was_cut.wait(WAIT_SECONDS), "its put was not cut off"
    assert len(extents_at(bucket)) == 1
    async with opened(bucket) as storage:
        storage.attach(MANIFEST)
        await only_these(storage, 1)


async def test_an_owner_that_only_seemed_dead_writes_nothing_more(bucket: Bucket) -> None:
    """Paused past its lease, it goes on with a put half sent, and is told to write and to drop."""
    bucket = dataclasses.replace(bucket, lease_seconds=LEASE_SECONDS)
    with owner_of(bucket) as owner:
        stored_by(owner, "store 1")
        in_flight(owner, bucket, "store 11")
        owner.pause()
        bucket.faults.is_flowing.set()
        async with opened(bucket) as storage:
            storage.attach(MANIFEST)
            while not (await storage.store(THIRD.keys, THIRD.offers())).num_stored:
                pass
            ours = contents(bucket)
            owner.go_on()
            assert int(owner.hear()) == 0, "it tells of what it put too late"
            late = contents(bucket)
            assert owner.ask("store 31") == 0, "it still writes"
            assert owner.ask("drop 1") == len(FIRST.units)
            assert owner.ask("store 31") == 0, "it still writes"
            assert contents(bucket) == late
            assert ours.items() <= late.items(), "it wrote where another is the owner"
            await only_these(storage, 1, 21)
        came_late = len(late) > len(ours)
    async with opened(bucket) as storage:
        storage.attach(MANIFEST)
        await only_these(storage, 1, 21, *([11] if came_late else []))


async def test_each_owner_gives_numbers_of_its_own(bucket: Bucket) -> None:
    for _ in range(3):
        async with opened(bucket) as storage:
            storage.attach(MANIFEST)
            storage.flush()
            await storage.store(FIRST.keys, FIRST.offers())
            newest = extents_at(bucket)[-1]
    assert int(newest.partition(".")[0], 16) >> TERM_SHIFT == 3


async def test_what_another_put_under_a_number_of_ours_is_a_miss(place: Place) -> None:
    """As if two owners had given the same number: the entries tell."""
    async with opened(place) as storage:
        storage.attach(MANIFEST)
        await storage.store(FIRST.keys, FIRST.offers())
        await storage.store(SECOND.keys, SECOND.offers())
        one, other = extents_at(place)
        content = content_at(place, one)
        assert content
        assert content != content_at(place, other)
        spoil_at(place, other, content)
        assert await read_all(storage, SECOND) == {}
        assert await read_all(storage, FIRST) == FIRST.units
