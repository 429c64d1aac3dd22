"""Stored units are spoilt on disk, and every prompt is asked again: no answer changes.

Bits flip, files are cut short, bytes and entries change places with those of other keys, older
generations come back, files become another model's or another tenant's (`corruptions.py`); while
the host-cache runs, and between two of its lives. How many units are found out at least is
FERRYMAN_TEST_SPOILT (60); docs/defects.md has what was tried by hand.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from tests.harness.cluster import (
    PAGE_SIZE,
    Cluster,
    ClusterShape,
    Generated,
    Service,
    assert_same,
    generate,
    one_process,
    running_cluster,
    save_served_model,
)
from tests.system.spoiling import Spoilt, StorageSpoiler
from tests.waiting import wait_until

from ferryman.cache.units import Tier
from ferryman.client import Client
from ferryman.llm import Completion
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.schedule.request import SamplingParams
from ferryman.wire.nats.subjects import Subjects

log = logging.getLogger(__name__)

NUM_SPOILT = int(os.environ.get("FERRYMAN_TEST_SPOILT", "60"))
pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(300 + NUM_SPOILT),
]

SHARE = 0.7
ROUNDS_IN_A_LIFE, MIN_ROUNDS, TRIES = 3, 2, 5
DEADLINE_SECONDS = 240.0
STORE_SECONDS = 5.0  # then it is asked again
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, logprobs=3, ignore_eos=True)
PROMPTS = [[(family * 11 + i * 3) % 120 + 3 for i in range(102)] for family in range(16)]
# Prefetches fetch everything, also on a slow machine. The router has no index: with one it would
# start prefetches by its last view of the devices, which are flushed in each round.
NOBODY_LISTENS = "redis://127.0.0.1:9/0"
WAITS = {"prefetch_policy": "wait_complete", "prefetch_threshold": PAGE_SIZE}
SHAPE = ClusterShape(
    has_storage=True,
    settings={
        "router": {"redis_url": NOBODY_LISTENS},
        "hostcache": {"prefetch_share": 1.0, "prefetch_threshold": PAGE_SIZE},
        "prefill": {**WAITS, "snapshot_grid": 2 * PAGE_SIZE},
    },
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = save_served_model(tmp_path_factory.mktemp("model"), "granite_moe")
    with running_cluster(model, tmp_path_factory.mktemp("cluster"), SHAPE) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def wanted(cluster: Cluster) -> list[Completion]:
    """The answer of one process to each prompt, without a cache."""
    with one_process(cluster.model) as llm:
        return llm.generate(PROMPTS, GREEDY)


def assert_all_same(answers: Sequence[Generated], wanted: Sequence[Completion]) -> None:
    for found, right in zip(answers, wanted, strict=True):
        assert_same(found, right)


def num_noted(cluster: Cluster) -> int:
    """Flaws, files that are gone, and files that a new life did not take over."""
    return cluster.hostcache().shown(
        "full_storage_corrupt",
        "recurrent_storage_corrupt",
        "storage_failures",
        "storage_removed_at_start",
    )


async def settle(cluster: Cluster, client: Client) -> None:
    """All prompts are in storage and nowhere else, and nothing is written any more."""
    for prompt in PROMPTS:
        await store(cluster, client, prompt)
    await flush(cluster)
    await asyncio.to_thread(await_still, cluster)


async def store(cluster: Cluster, client: Client, prompt: Sequence[int]) -> None:
    """Waits until a prompt is stored; sends it again if a slow call lost some of its units."""
    for _ in range(TRIES - 1):
        with suppress(TimeoutError):
            async with asyncio.timeout(STORE_SECONDS):
                await cluster.await_stored(prompt, tier=Tier.STORAGE)
            return
        await flush(cluster)
        await generate(client, prompt, GREEDY, deadline_seconds=DEADLINE_SECONDS)
    await cluster.await_stored(prompt, tier=Tier.STORAGE)


async def ask_all(client: Client) -> list[Generated]:
    asked = (generate(client, p, GREEDY, deadline_seconds=DEADLINE_SECONDS) for p in PROMPTS)
    return list(await asyncio.gather(*asked))


async def flush(cluster: Cluster) -> None:
    async with asyncio.timeout(120):
        while any(worker.ledger()["full"]["by_role"] for worker in workers_of(cluster)):
            for role in ("prefill", "decode"):
                await cluster.flush_device(role)
        busy = ("backlog_waiting", "store_leases", "store_reservations", "store_units")
        while cluster.hostcache().shown(*busy):
            await cluster.flush_device("hostcache")


def workers_of(cluster: Cluster) -> list[Service]:
    return [*cluster.of_role("prefill"), *cluster.of_role("decode")]


def await_still(cluster: Cluster) -> None:
    """Until two looks at the storage folder in a row see the same."""
    before: object = None

    def is_still() -> bool:
        nonlocal before
        last, before = before, None
        with suppress(FileNotFoundError):
            files = sorted(cluster.storage_folder().glob("*"))
            before = [(path, path.stat().st_mtime_ns) for path in files]
        return before is not None and last == before

    wait_until(is_still, "the storage folder to be still")


@dataclass
class Tally:
    """The results of the rounds so far. `found` counts units that the host-cache has dropped."""

    rounds: int = 0
    found: int = 0
    unread: int = 0
    noted: int = 0
    hits: int = 0
    reused: int = 0
    ways: Counter[str] = field(default_factory=Counter)

    @property
    def is_new_life(self) -> bool:
        """Whether the next round begins with one."""
        return self.rounds % ROUNDS_IN_A_LIFE == 1


class Rounds:
    """Spoils, asks everything again, and looks at what became of what was spoilt."""

    def __init__(self, cluster: Cluster, client: Client, wanted: Sequence[Completion]) -> None:
        self.cluster, self.client, self.wanted = cluster, client, wanted
        manifest = load_model(cluster.model, LoadOptions("float64", page_size=PAGE_SIZE)).manifest
        folder, rng = cluster.storage_folder(), random.Random(NUM_SPOILT)
        self.spoiler = StorageSpoiler(folder, manifest, rng)
        self.chains = [cluster.keys_of(prompt) for prompt in PROMPTS]
        self.tally = Tally()

    async def go(self) -> None:
        """One round, from prompts that are stored to prompts that are stored again."""
        is_new_life = self.tally.is_new_life
        noted = 0 if is_new_life else num_noted(self.cluster)
        spoilt = self.between_two_lives() if is_new_life else self.spoiler.spoil(SHARE)
        answers = await self.ask()
        self.check_that_nothing_spoilt_was_used(answers, spoilt)
        if not is_new_life:
            await self.find_out(spoilt)
        hurt = sum(spoilt.num_usable(keys) < len(keys) for keys in self.chains)
        noted = num_noted(self.cluster) - noted
        assert noted >= (1 if is_new_life else hurt), "flaws were not counted"
        self.count(answers, spoilt, noted)

    async def ask(self) -> list[Generated]:
        """All prompts at once; afterwards they are in storage again."""
        answers = await ask_all(self.client)
        assert_all_same(answers, self.wanted)
        await settle(self.cluster, self.client)
        return answers

    async def find_out(self, spoilt: Spoilt) -> None:
        """Waits until all needed spoilt units are dropped. Whole prompts were stored, so each is
        read; a call that took too long may have left some, so the prompts are sent again."""
        for _ in range(TRIES):
            left = self.spoiler.not_given_up(spoilt.asked_for(self.chains))
            if not left:
                return
            await self.ask()
        units = [(each.unit.kind, each.unit.page_index, each.unit.key.hex()) for each in left]
        raise AssertionError(f"spoilt units were not found out: {units}")

    def between_two_lives(self) -> Spoilt:
        """Spoils files while no host-cache runs, and the model's manifest beside them."""
        assert self.cluster.hostcache().stop() == 0
        spoilt = self.spoiler.spoil(SHARE)
        (self.spoiler.folder / "manifest.json").write_bytes(self.spoiler.rng.randbytes(300))
        self.cluster.start("hostcache").await_ready()
        self.cluster.await_attached()
        return spoilt

    def check_that_nothing_spoilt_was_used(
        self, answers: Sequence[Generated], spoilt: Spoilt
    ) -> None:
        """A second attempt finds on the device what the first one computed: it shows nothing."""
        num_first = 0
        for keys, answer in zip(self.chains, answers, strict=True):
            assert answer.usage is not None
            cached = answer.usage.cached
            if cached.total != cached.storage:
                continue
            num_first += 1
            num_pages = cached.total // PAGE_SIZE
            assert num_pages <= spoilt.num_usable(keys), "a page was used that was spoilt"
            assert not num_pages or spoilt.has_snapshot(keys, num_pages), "a spoilt snapshot"
        assert num_first > len(PROMPTS) // 2, "devices and arena were empty"

    def count(self, answers: Sequence[Generated], spoilt: Spoilt, noted: int) -> None:
        """Adds a round. A unit that was not read stays spoilt in the next round."""
        tally = self.tally
        self.spoiler.keep_unread(spoilt, is_new_life=tally.is_new_life)
        reused = [each.usage.cached.storage for each in answers if each.usage]
        tally.rounds += 1
        tally.found += len(spoilt.units) - len(self.spoiler.unread)
        tally.unread = len(self.spoiler.unread)
        tally.noted += noted
        tally.hits, tally.reused = tally.hits + sum(map(bool, reused)), tally.reused + sum(reused)
        tally.ways += spoilt.ways


async def test_no_answer_changes_when_stored_units_are_spoilt(
    cluster: Cluster, wanted: list[Completion]
) -> None:
    async with Client(cluster.grpc) as client:
        assert_all_same(await ask_all(client), wanted)
        await settle(cluster, client)
        rounds = Rounds(cluster, client, wanted)
        while rounds.tally.found < NUM_SPOILT or rounds.tally.rounds < MIN_ROUNDS:
            await rounds.go()
            log.warning("%s", rounds.tally)
    assert rounds.tally.hits, "what was left whole was to be used"
    async with cluster.bus() as bus:
        told = await bus.history(f"{Subjects().root}.life.hostcache.*.*.corrupt", max_events=10)
    assert told, "flaws were not published"
    cluster.assert_ledgers_balance()
    assert cluster.hostcache().ledger()["balances"]
