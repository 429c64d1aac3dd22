"""Copies to the host tier take a piece after each step that draws tokens, and no unit is lost."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from itertools import count

import pytest
from tests.doubles.stamps import fake_manifest
from tests.harness.pair import engine_of
from tests.harness.schedule import PAGE, ScheduledWorker, request
from tests.harness.schedule import worker as schedule_worker
from tests.worker.stored_host import StoredHost

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.engine.engine import Engine
from ferryman.runtime.life import alongside
from ferryman.schedule.batch import StepOutcome, StepPlan
from ferryman.schedule.events import Cached, Event
from ferryman.schedule.request import Request
from ferryman.schedule.sequence import Goal
from ferryman.tiers.write_policy import WRITE_POLICIES
from ferryman.wire.grpc.rpc import NO_TAGS
from ferryman.wire.hostcache.copy_pace import LEAST_BYTES, SPREAD_STEPS, StepPace
from ferryman.worker.backup import DeviceBackup
from ferryman.worker.loop import StepLoop

PAGES_ONLY = fake_manifest(PAGE, kinds=[Kind.FULL])
UNIT = PAGES_ONLY.layout(Kind.FULL).slot_bytes
ROOM = 200
HOST_ROOM = 2_000


class SteppedWorker:
    """A worker whose steps end when the test says so. Each piece of a copy is one page."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pending: deque[tuple[StepPlan, Future[StepOutcome]]] = deque()
        self.host = StoredHost(PAGES_ONLY, {Kind.FULL: HOST_ROOM})
        self.backup = DeviceBackup(
            engine.scheduler,
            engine.transfer.store_unit,
            self.host,
            WRITE_POLICIES["write_through"],
            lambda: None,
            StepPace(least_bytes=UNIT),
        )
        ticks = count(1)
        self._loop = StepLoop(
            engine.scheduler,
            self._submit,
            asyncio.Event(),
            self._on_events,
            lambda: float(next(ticks)),
            on_changes=self.backup.changed,
            on_steps=self.backup.stepped,
        )

    def _submit(self, plan: StepPlan) -> Future[StepOutcome]:
        self._pending.append((plan, Future()))
        return self._pending[-1][1]

    def _on_events(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Cached):
                self.backup.added([(unit.kind, unit.key) for unit in event.units], NO_TAGS)

    def ask(self, asked: Request, goal: Goal = Goal.DECODE) -> None:
        self._engine.scheduler.submit(asked, goal)
        self._loop.advance()

    def read(self, key: PageKey) -> bytes:
        """The bytes of a page on the device."""
        tree = self._engine.scheduler.allocator.tree
        return bytes(self._engine.transfer.read(Kind.FULL, tree.slot(Kind.FULL, key).slot))

    def flush(self) -> int:
        """Drops what is not in use; the number of slots that freed."""
        return self._engine.scheduler.flush()

    @property
    def num_waiting(self) -> int:
        """Requests that are not admitted yet."""
        return self._engine.scheduler.statistics().waiting

    @property
    def num_free(self) -> int:
        return self._engine.scheduler.allocator.pools[Kind.FULL].num_free

    @property
    def num_copied(self) -> int:
        """Pages of which the host has the bytes, visible or not."""
        return len(self.host.content)

    async def step(self) -> int:
        """Ends the oldest step; returns how many pages were copied because of it."""
        before = self.num_copied
        plan, future = self._pending.popleft()
        future.set_result(self._engine.stream.submit(plan).result())
        self._loop.advance()
        await settled()
        return self.num_copied - before

    async def steps(self, number: int) -> list[int]:
        return [await self.step() for _ in range(number)]


@pytest.fixture
def long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_worker, "MAX_LEN", 1_000)


async def settled() -> None:
    """Lets the backup go as far as it can without another step."""
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def stepped_worker(num_slots: int = ROOM, chunk: int = 128) -> AsyncIterator[SteppedWorker]:
    worker = ScheduledWorker(PAGES_ONLY, {Kind.FULL: num_slots}, chunk_tokens=chunk)
    with engine_of(worker) as engine:
        here = SteppedWorker(engine)
        async with alongside(here.backup.run()):
            yield here
            await settled()


def prompt(num_pages: int, first: int = 1, max_tokens: int = 30) -> Request:
    """One token more than so many pages."""
    name = f"r{first}"
    return request(PAGES_ONLY, name, [first] * (num_pages * PAGE + 1), max_tokens)


def usable(here: SteppedWorker, keys: Sequence[PageKey]) -> int:
    return here.host.usable_pages(keys)


async def test_a_prompt_is_copied_a_piece_after_each_step_that_draws() -> None:
    async with stepped_worker() as here:
        here.ask(asked := prompt(10))
        assert await here.step() == 0, "the prompt's own step, beside which the first token travels"
        assert await here.steps(9) == [1] * 9
        assert usable(here, asked.keys) == 0, "a unit is visible only when all are there"
        assert await here.step() == 1
        assert usable(here, asked.keys) == 10


async def test_copies_take_no_breaks_while_only_prompts_are_computed() -> None:
    async with stepped_worker(chunk=2 * PAGE) as here:
        here.ask(prompt(10), Goal.HAND_OFF)
        assert await here.steps(6) == [0, 0, 0, 0, 0, 10]


async def test_copies_take_no_breaks_once_no_request_runs() -> None:
    async with stepped_worker() as here:
        here.ask(asked := prompt(10, max_tokens=3))
        assert await here.steps(2) == [0, 1]
        await here.step()
        assert usable(here, asked.keys) == 10


async def test_a_copy_that_is_waited_for_takes_no_breaks() -> None:
    async with stepped_worker() as here:
        here.ask(first := prompt(10))
        await here.step()
        here.ask(second := prompt(3, first=2))
        await here.steps(3)
        assert 0 < here.num_copied < 10
        keeping = asyncio.create_task(here.backup.keep_now(second.keys, NO_TAGS))
        await settled()
        assert keeping.done()
        assert usable(here, second.keys) == 3
        assert usable(here, first.keys) == 10, "it had its turn before"


async def test_nothing_waits_for_steps_that_may_be_evicted_before_its_copy() -> None:
    """A pool with room for little more than two prompts: the second one takes the last free slots,
    and what is in use cannot be evicted, so the third would find none."""
    async with stepped_worker(num_slots=24) as here:
        here.ask(first := prompt(10, max_tokens=9))
        assert await here.steps(3) == [0, 1, 1]
        here.ask(second := prompt(9, first=2, max_tokens=9))
        await here.steps(4)
        assert usable(here, first.keys) == 10
        assert usable(here, second.keys) == 9
        assert here.backup.num_lost == 0


@pytest.mark.usefixtures("long_prompts")
async def test_nothing_waits_for_steps_if_the_next_prompt_may_need_the_slots_of_as_much() -> None:
    """A prompt is being copied and one waits; a fifth of the pool is free. A third one would evict
    what waits."""
    async with stepped_worker(num_slots=260, chunk=400 * PAGE) as here:
        here.ask(prompt(1, first=2, max_tokens=300))
        await here.steps(6)
        for first in (1, 3):
            here.ask(prompt(100, first=first, max_tokens=2))
            await here.steps(2)
        assert 0 < here.num_free < 100
        here.ask(prompt(100, first=4, max_tokens=2))
        await here.steps(4)
        assert here.backup.num_lost == 0


@pytest.mark.usefixtures("long_prompts")
async def test_a_copy_hurries_whose_slots_the_next_prompt_waits_for() -> None:
    async with stepped_worker(num_slots=320, chunk=400 * PAGE) as here:
        here.ask(prompt(60, first=1, max_tokens=1))
        await here.step()
        here.ask(prompt(1, first=2, max_tokens=150))
        await here.steps(6)
        here.ask(prompt(200, first=3, max_tokens=2))
        await here.steps(3)
        here.ask(prompt(150, first=4, max_tokens=2))
        await here.steps(4)
        assert here.num_waiting == 0


@pytest.mark.usefixtures("long_prompts")
async def test_what_a_new_host_is_offered_is_copied_before_it_is_evicted() -> None:
    async with stepped_worker(num_slots=260, chunk=400 * PAGE) as here:
        offered = [prompt(80, first=1, max_tokens=1), prompt(80, first=3, max_tokens=1)]
        for asked in offered:
            here.ask(asked)
            await here.step()
        here.ask(prompt(1, first=2, max_tokens=300))
        await here.steps(6)
        here.host.restart()
        here.backup.host_usable()
        await settled()
        for first in range(4, 16):
            here.ask(prompt(14, first=first, max_tokens=2))
            await here.steps(2)
        assert [usable(here, asked.keys) for asked in offered] == [80, 80]


async def test_a_step_that_ends_a_prompt_beside_streams_has_no_room_for_its_copy() -> None:
    async with stepped_worker() as here:
        here.ask(prompt(1, first=2))
        await here.steps(4)
        here.ask(prompt(10, first=3))
        assert await here.steps(3) == [0, 0, 0], "two that were on their way, and the prompt's own"
        assert await here.steps(3) == [1, 1, 1]


async def test_a_worker_that_drains_copies_without_breaks() -> None:
    async with stepped_worker() as here:
        here.ask(asked := prompt(10))
        assert await here.steps(2) == [0, 1]
        here.backup.hurry()
        await settled()
        assert usable(here, asked.keys) == 10


async def test_a_slot_whose_copy_waits_is_not_reused() -> None:
    async with stepped_worker() as here:
        here.ask(asked := prompt(10, max_tokens=30))
        await here.steps(3)
        held = {key: here.read(key) for key in asked.keys}
        assert here.flush() == 0
        await here.steps(8)
        assert {key: here.host.content[Kind.FULL, key] for key in asked.keys} == held


async def test_a_backlog_is_copied_in_a_number_of_steps() -> None:
    pace = StepPace()
    pace.stepped(0, 0, is_drawing=True)
    waiting = 3 * SPREAD_STEPS * LEAST_BYTES
    pace.stepped(1, waiting, is_drawing=True)
    sizes = [LEAST_BYTES] * 100
    assert await pace.next_run(sizes, 0) == 3


async def test_pieces_do_not_shrink_with_what_is_left() -> None:
    pace, copied = StepPace(least_bytes=1), list[int]()
    pace.stepped(0, 0, is_drawing=True)
    copying = asyncio.create_task(copy_all(pace, [1] * 320, copied))
    for num_steps in range(SPREAD_STEPS + 1):
        assert num_steps <= SPREAD_STEPS
        await settled()
        pace.stepped(1, 0, is_drawing=True)
    await copying
    assert len(copied) == 320


async def test_a_worker_that_never_draws_copies_all_at_once() -> None:
    pace = StepPace()
    pace.stepped(1, 0, is_drawing=False)
    assert await pace.next_run([LEAST_BYTES] * 100, 0) == 100


async def test_a_unit_larger_than_a_piece_takes_the_room_of_later_steps() -> None:
    pace = StepPace(least_bytes=10)
    pace.stepped(0, 0, is_drawing=True)
    copied: list[int] = []
    copying = asyncio.create_task(copy_all(pace, [35, 10, 10], copied))
    for _ in range(6):
        pace.stepped(1, 0, is_drawing=True)
        await settled()
        copied.append(0)
    await copying
    assert copied == [35, 0, 0, 0, 10, 0, 10, 0, 0]


async def copy_all(pace: StepPace, sizes: list[int], copied: list[int]) -> None:
    first = 0
    while first < len(sizes):
        end = first + await pace.next_run(sizes, first)
        copied += sizes[first:end]
        first = end
