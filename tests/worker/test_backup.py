"""The units that a worker writes to the host tier, by each policy, and those it does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.harness.pair import engine_of
from tests.harness.schedule import ALL_KINDS, ATTENTION, HYBRID, WatchedWorker, books, request
from tests.worker.stored_host import StoredHost

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.engine.engine import Engine
from ferryman.schedule.events import Cached, SequenceAdmitted
from ferryman.schedule.request import Request
from ferryman.schedule.sequence import Goal
from ferryman.tiers.prefetch_values import DEFAULT_WISH
from ferryman.tiers.write_policy import WRITE_POLICIES, write_policy_named
from ferryman.wire.grpc.rpc import NO_TAGS
from ferryman.wire.hostcache.copy_pace import StepPace
from ferryman.worker import backup
from ferryman.worker.backup import DeviceBackup
from ferryman.worker.host import HostTierBridge

PAGE, CHUNK = 4, 8
ROOMY = {Kind.FULL: 40, Kind.WINDOW: 40, Kind.RECURRENT: 30}


class Node:
    """A worker, its host tier, and the host behind it; events are passed on as the shell does."""

    def __init__(self, worker: WatchedWorker, engine: Engine, host: StoredHost, name: str) -> None:
        self.worker, self.host = worker, host
        scheduler, store_unit = engine.scheduler, engine.transfer.store_unit
        policy = write_policy_named(name)
        self.backup = DeviceBackup(scheduler, store_unit, host, policy, lambda: None, StepPace())
        self.tier = HostTierBridge(scheduler, host, self.backup, DEFAULT_WISH)  # type: ignore[arg-type]
        self._num_heard = 0

    async def run(self, asked: Request, goal: Goal = Goal.DECODE) -> tuple[PageKey, ...]:
        """One request to its end, and all that is written because of it; keys of what it left."""
        self.worker.submit(asked, goal)
        keys: tuple[PageKey, ...] = ()
        while self.worker.plan() | self.worker.run_oldest():
            keys = self.pass_on() or keys
            await self.backup.write_waiting()
        return keys

    def pass_on(self) -> tuple[PageKey, ...]:
        keys: tuple[PageKey, ...] = ()
        for event in self.worker.events[self._num_heard :]:
            match event:
                case SequenceAdmitted(plan=plan):
                    asked = self.worker.requests[event.request_id]
                    self.tier.planned(asked, plan, NO_TAGS)
                case Cached(keys=keys):
                    self.tier.cached(event, NO_TAGS)
        self._num_heard = len(self.worker.events)
        self.tier.changed(self.worker.scheduler.take_cache_changes())
        return keys

    def flush(self) -> None:
        self.worker.scheduler.flush()
        self.pass_on()


@contextmanager
def node(
    manifest: StateManifest,
    policy: str,
    device: dict[Kind, int] = ROOMY,
    host: dict[Kind, int] = ROOMY,
) -> Iterator[Node]:
    worker = WatchedWorker(manifest, device)
    with engine_of(worker) as engine:
        room = StoredHost(manifest, {kind: host[kind] for kind in manifest.kinds})
        yield Node(worker, engine, room, policy)
        worker.scheduler.flush()
        assert books(worker) == {}, "nothing is leased once all is written"


def prompt(name: str, length: int, first: int = 1, max_tokens: int = 1) -> Request:
    return request(HYBRID, name, [first] * length, max_tokens)


def full_pages(length: int) -> int:
    return length // PAGE


@pytest.mark.parametrize("tail", range(1, PAGE))
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("name", ["hybrid", "all kinds", "attention"])
async def test_row_18_every_prompt_is_backed_up_however_its_last_chunk_ends(
    name: str, num_chunks: int, tail: int
) -> None:
    """Upstream a last chunk shorter than a page inserted nothing and so scheduled no backup."""
    manifest = {"hybrid": HYBRID, "all kinds": ALL_KINDS, "attention": ATTENTION}[name]
    length = num_chunks * CHUNK + tail
    with node(manifest, "write_through") as here:
        asked = request(manifest, "r0", [1] * length, 1)
        await here.run(asked, Goal.HAND_OFF)
        here.worker.scheduler.release_held("r0", here.worker.now)
        assert here.host.usable_pages(asked.keys) == full_pages(length)


async def test_a_unit_is_offered_once() -> None:
    with node(HYBRID, "write_through") as here:
        asked = prompt("r0", 3 * CHUNK + 1)
        await here.run(asked)
        names = [name for offer in here.host.offered for name in offer]
        assert len(names) == len(set(names))
        before = len(here.host.offered)
        await here.run(prompt("r1", 3 * CHUNK + 1))
        assert len(here.host.offered) == before, "nothing was new, so nothing was offered"


async def test_what_is_written_is_what_lies_on_the_device() -> None:
    with node(ALL_KINDS, "write_through") as here:
        await here.run(request(ALL_KINDS, "r0", [1] * 21, 6))
        tree, transfer = here.worker.scheduler.allocator.tree, here.worker.engine.transfer
        for (kind, key), content in here.host.content.items():
            assert content == bytes(transfer.read(kind, tree.slot(kind, key).slot))


async def test_selective_writes_what_is_reused_twice() -> None:
    with node(HYBRID, "write_through_selective") as here:
        for number in range(3):
            assert here.host.offered == [], f"written before its second hit: run {number}"
            await here.run(prompt(f"r{number}", 2 * CHUNK + 1))
        assert here.host.usable_pages(prompt("r", 2 * CHUNK).keys) == full_pages(2 * CHUNK)


async def test_write_back_waits_until_room_is_wanted_and_loses_nothing() -> None:
    scarce = {Kind.FULL: 12, Kind.RECURRENT: 26}
    with node(HYBRID, "write_back", scarce) as here:
        first = prompt("r0", 2 * CHUNK + 1)
        await here.run(first)
        assert here.host.offered == []
        for number in range(2, 6):
            await here.run(prompt(f"r{number}", 3 * CHUNK + 1, number))
        tree = here.worker.scheduler.allocator.tree
        assert tree.match_depth(first.keys) < full_pages(2 * CHUNK), "it was to be evicted"
        assert here.host.usable_pages(first.keys) == full_pages(2 * CHUNK)
        assert here.backup.num_lost == 0


@pytest.mark.parametrize("policy", sorted(WRITE_POLICIES))
async def test_row_48_eviction_goes_on_when_the_host_has_no_room(policy: str) -> None:
    scarce, none = {Kind.FULL: 10, Kind.RECURRENT: 26}, {Kind.FULL: 0, Kind.RECURRENT: 0}
    with node(HYBRID, policy, scarce, none) as here:
        for number in range(1, 7):
            asked = prompt(f"r{number}", 3 * CHUNK + 1, number, max_tokens=4)
            await here.run(asked)
            assert here.worker.tokens[asked.request_id] == here.worker.expected(asked.request_id)
        assert here.host.content == {}


async def test_what_had_to_go_before_it_could_be_written_is_counted() -> None:
    with node(HYBRID, "write_back") as here:
        await here.run(prompt("r0", 2 * CHUNK + 1))
        here.flush()
        assert here.backup.num_lost >= full_pages(2 * CHUNK)
        assert here.host.offered == []


async def test_what_could_not_be_stored_comes_again_when_it_is_used() -> None:
    with node(HYBRID, "write_through") as here:
        asked = prompt("r0", 2 * CHUNK + 1)
        here.host.num_failing = 1000
        await here.run(asked)
        assert here.host.offered
        assert here.host.content == {}
        here.host.num_failing = 0
        await here.run(prompt("r1", 2 * CHUNK + 1))
        assert here.host.usable_pages(asked.keys) == full_pages(2 * CHUNK)


async def test_row_65_what_left_the_device_and_the_host_is_offered_again_when_it_is_computed() -> (
    None
):
    """Another chain takes the host's room; this worker gets no event and asks no more about it."""
    with node(HYBRID, "write_through", host={Kind.FULL: 6, Kind.RECURRENT: 6}) as here:
        asked = prompt("r0", 2 * CHUNK + 1)
        await here.run(asked)
        assert here.host.usable_pages(asked.keys) == full_pages(2 * CHUNK)
        here.flush()
        await here.run(prompt("r1", 3 * CHUNK + 1, first=2))
        assert here.host.usable_pages(asked.keys) == 0, "it was to be lost on the host"
        here.flush()
        num_attaches = here.host.num_attaches
        await here.run(prompt("r2", 2 * CHUNK + 1))
        assert here.worker.tokens["r2"] == here.worker.expected("r2")
        assert here.host.usable_pages(asked.keys) == full_pages(2 * CHUNK)
        assert here.host.num_attaches == num_attaches, "no new host has the books begun anew"


async def test_what_finds_too_much_waiting_is_counted_and_comes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with node(HYBRID, "write_through") as here:
        asked = prompt("r0", 2 * CHUNK + 1)
        with monkeypatch.context() as full:
            full.setattr(backup, "MAX_WAITING", 0)
            await here.run(asked)
        assert here.host.offered == []
        assert here.backup.statistics().num_dropped >= full_pages(2 * CHUNK)
        await here.run(prompt("r1", 2 * CHUNK + 1))
        assert here.host.usable_pages(asked.keys) == full_pages(2 * CHUNK)


async def test_a_path_that_the_host_gave_up_is_offered_again_as_a_whole() -> None:
    with node(HYBRID, "write_through", host={Kind.FULL: 6, Kind.RECURRENT: 6}) as here:
        await here.run(prompt("r0", 2 * CHUNK + 1))
        other = prompt("r1", 3 * CHUNK + 1, first=2)
        await here.run(other)
        assert here.host.usable_pages(prompt("r0", 2 * CHUNK).keys) == 0, "it was to be given up"
        longer = request(HYBRID, "r2", [1] * (2 * CHUNK) + [3] * 5, 1)
        await here.run(longer)
        assert here.host.usable_pages(longer.keys) == len(longer.keys)


async def test_another_host_gets_what_the_last_one_had() -> None:
    with node(HYBRID, "write_through") as here:
        await here.run(prompt("r0", 2 * CHUNK + 1))
        here.host.restart()
        longer = request(HYBRID, "r1", [1] * (2 * CHUNK) + [3] * 5, 1)
        await here.run(longer)
        assert here.host.usable_pages(longer.keys) == len(longer.keys)


async def test_a_host_that_is_away_gets_it_with_the_next_of_its_path() -> None:
    with node(HYBRID, "write_through") as here:
        here.host.node_id = ""
        await here.run(prompt("r0", 2 * CHUNK + 1))
        assert here.host.content == {}
        here.host.node_id = "local"
        longer = request(HYBRID, "r1", [1] * (2 * CHUNK) + [3] * 5, 1)
        await here.run(longer)
        assert here.host.usable_pages(longer.keys) == len(longer.keys)


@pytest.mark.parametrize("policy", sorted(WRITE_POLICIES))
async def test_what_was_computed_before_a_host_came_is_offered_when_it_comes(policy: str) -> None:
    """No later request is needed: what the policy, or an ended conversation, wanted there."""
    with node(HYBRID, policy) as here:
        here.host.node_id = ""
        first = prompt("r0", 2 * CHUNK + 1)
        await here.run(first)
        keys = await here.run(prompt("r1", CHUNK + 1, first=2, max_tokens=10))
        here.tier.ended("r1", NO_TAGS)
        await here.backup.write_waiting()
        assert here.host.content == {}
        here.host.node_id = "local"
        here.host.restart()
        await here.backup.write_waiting()
        said = here.worker.requests["r1"].token_ids.tolist() + here.worker.tokens["r1"]
        assert here.host.usable_pages(request(HYBRID, "next", said, 1).keys) == len(keys)
        wanted = full_pages(2 * CHUNK) if policy == "write_through" else 0
        assert here.host.usable_pages(first.keys) == wanted


async def test_a_new_host_is_offered_each_unit_of_the_tree_once_whether_or_not_it_takes_it() -> (
    None
):
    with node(HYBRID, "write_through") as here:
        for number in range(3):  # two paths, one of which has a branch
            ids = [1 + number % 2] * (2 * CHUNK) + [3 + number] * 5
            await here.run(request(HYBRID, f"r{number}", ids, 1))
        tree = here.worker.scheduler.allocator.tree
        held = [name for name in here.host.content if tree.has(*name)]
        here.host.offered.clear()
        here.host.restart()
        here.host.num_failing = 1000
        for _ in range(2):
            await here.backup.write_waiting()
            assert len(here.host.offered) == 3, "the same host is not asked again"
        assert here.host.content == {}
        here.host.num_failing = 0
        here.host.offered.clear()
        here.host.restart()
        await here.backup.write_waiting()
        assert sum(map(len, here.host.offered)) == len(held) > 0
        assert sorted(here.host.content) == sorted(held)


async def test_a_host_that_answers_again_is_offered_once_more_what_it_did_not_answer() -> None:
    """A busy one: the conversation's next turn needs no luck. One that goes on failing is not asked
    without end."""
    with node(HYBRID, "write_through") as here:
        asked = prompt("r0", 2 * CHUNK + 1)
        here.host.num_failing = 1000
        await here.run(asked)
        here.host.num_failing = 0
        here.host.num_times_usable += 1
        await here.backup.write_waiting()
        assert here.host.usable_pages(asked.keys) == full_pages(2 * CHUNK)
        here.host.num_failing = 1000
        await here.run(prompt("r1", 2 * CHUNK + 1, first=2))
        counts = []
        for _ in range(3):
            here.host.num_times_usable += 1
            await here.backup.write_waiting()
            counts.append(len(here.host.offered))
        assert counts == [counts[0]] * 3
        here.host.num_failing = 0
        here.host.restart()
        await here.backup.write_waiting()
        for first in (1, 2):
            there = here.host.usable_pages(prompt("r", 2 * CHUNK, first=first).keys)
            assert there == full_pages(2 * CHUNK)


async def test_what_is_new_is_written_before_what_another_host_had() -> None:
    with node(HYBRID, "write_through") as here:
        await here.run(prompt("r0", 2 * CHUNK + 1))
        gone = prompt("r1", CHUNK + 1, first=3)
        here.host.num_failing = 1000
        await here.run(gone)
        here.flush()
        assert here.host.usable_pages(gone.keys) == 0
        here.host.num_failing = 0
        await here.run(prompt("r2", 2 * CHUNK + 1, first=4))
        here.host.restart()
        here.host.paths.clear()
        here.worker.submit(latest := prompt("r3", 2 * CHUNK + 1, first=5))
        while here.worker.plan() | here.worker.run_oldest():
            here.pass_on()
        await here.backup.write_waiting()
        before = prompt("r", 2 * CHUNK, first=4)
        assert here.host.paths.index(latest.keys[-1]) < here.host.paths.index(before.keys[-1])
        assert here.host.usable_pages(before.keys) == full_pages(2 * CHUNK)
        assert here.host.usable_pages(gone.keys) == 0, "what left the tree is not offered"


@pytest.mark.parametrize("policy", sorted(WRITE_POLICIES))
async def test_an_ended_conversation_is_stored_whatever_the_policy(policy: str) -> None:
    with node(HYBRID, policy) as here:
        keys = await here.run(prompt("r0", CHUNK + 1, max_tokens=10))
        here.tier.ended("r0", NO_TAGS)
        await here.backup.write_waiting()
        said = here.worker.requests["r0"].token_ids.tolist() + here.worker.tokens["r0"]
        resumable = here.host.usable_pages(request(HYBRID, "next", said, 1).keys)
        assert resumable == len(keys) > full_pages(CHUNK), "and not only its prompt"


async def test_a_chain_that_is_dropped_while_it_is_copied_does_not_stay_in_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first report comes before the host knows of the copy, and so voids nothing."""
    with node(HYBRID, "write_through") as here:
        asked, store, dropped = prompt("r0", 2 * CHUNK + 1), here.host.store, list[int]()

        async def drop_and_store(keys: Any, units: Any, **choices: Any) -> int | None:
            if not dropped:
                here.tier.chain_dropped(asked.keys[0])
            dropped.append(here.host.usable_pages(asked.keys))
            return await store(keys, units, **choices)

        monkeypatch.setattr(here.host, "store", drop_and_store)
        here.worker.submit(asked)
        while not dropped and here.worker.plan() | here.worker.run_oldest():
            here.pass_on()
            await here.backup.write_waiting()
        assert here.host.content, "it was copied"
        assert here.host.usable_pages(asked.keys) == 0
        here.worker.drain()
