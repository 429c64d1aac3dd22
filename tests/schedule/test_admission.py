"""Admission leaves room for those that run to grow; what lacks is taken from the newest."""

from __future__ import annotations

import pytest
from tests.harness.schedule import HYBRID, ScheduledWorker, request

from ferryman.cache.manifest import Kind
from ferryman.errors import OutOfSlots
from ferryman.schedule.events import Finished, Retracted, SequenceAdmitted


def one_that_decodes(full: int) -> ScheduledWorker:
    """It has two pages of `full`, and will need a third."""
    manifest = HYBRID
    worker = ScheduledWorker(manifest, {Kind.FULL: full, Kind.RECURRENT: 40}, overlap=False)
    worker.submit(request(manifest, "r0", [1] * 5, 8))
    worker.plan()
    worker.run_oldest()
    assert len(worker.tokens["r0"]) == 1
    return worker


@pytest.mark.parametrize(("full", "admitted"), [(5, ["r0"]), (6, ["r0", "r1"])])
def test_a_page_stays_free_for_each_request_that_decodes(full: int, admitted: list[str]) -> None:
    worker = one_that_decodes(full)
    worker.submit(request(worker.manifest, "r1", [2] * 9, 2))
    worker.plan()
    assert [event.request_id for event in worker.seen(SequenceAdmitted)] == admitted
    worker.drain()
    assert not worker.seen(Retracted), "there was room to grow"
    for name in ("r0", "r1"):
        assert worker.tokens[name] == worker.expected(name)


def test_a_reservation_leaves_the_same_room() -> None:
    for full, has_room in ((5, False), (6, True)):
        worker = one_that_decodes(full)
        asked = request(worker.manifest, "r1", [2] * 9, 2)
        if has_room:
            worker.scheduler.reservations.reserve("promise", asked, worker.now)
            continue
        with pytest.raises(OutOfSlots):
            worker.scheduler.reservations.reserve("promise", asked, worker.now)


@pytest.mark.parametrize("overlap", [False, True], ids=["one step at a time", "overlap"])
def test_the_newest_is_retracted_first_and_the_oldest_never(overlap: bool) -> None:
    manifest = HYBRID
    room = {Kind.FULL: 9, Kind.RECURRENT: 40}
    worker = ScheduledWorker(manifest, room, overlap=overlap)
    for index in range(3):
        worker.submit(request(manifest, f"r{index}", [index] * (5 + index), 18))
    worker.drain()
    retracted = [event.request_id for event in worker.seen(Retracted)]
    assert retracted, "the pages were meant to run out"
    assert retracted[0] == "r2"
    assert "r0" not in retracted
    for name in worker.requests:
        assert worker.tokens[name] == worker.expected(name)


NUM_DECODING = 3
NEW = request(HYBRID, "new", [9] * 7, 2)
NEW_PAGES = 2


def decoding_with_free(num_free: int) -> ScheduledWorker:
    """Three requests that decode within a page each, and `num_free` free pages."""
    sizes = {Kind.FULL: NUM_DECODING + num_free, Kind.RECURRENT: 40}
    worker = ScheduledWorker(HYBRID, sizes, overlap=False, max_running=8)
    for index in range(NUM_DECODING):
        worker.submit(request(HYBRID, f"r{index}", [index] * 2, 3))
    while len(worker.seen(SequenceAdmitted)) < NUM_DECODING or worker.queued:
        worker.plan()
        worker.run_oldest()
    assert worker.scheduler.allocator.pools[Kind.FULL].num_free == num_free
    return worker


@pytest.mark.parametrize("num_free", range(NEW_PAGES - 1, NEW_PAGES + NUM_DECODING + 2))
def test_a_request_is_let_in_when_everyone_who_decodes_could_still_take_a_page(
    num_free: int,
) -> None:
    worker = decoding_with_free(num_free)
    worker.submit(NEW)
    worker.plan()
    is_in = "new" in {event.request_id for event in worker.seen(SequenceAdmitted)}
    assert is_in == (num_free >= NEW_PAGES + NUM_DECODING)
    left = worker.scheduler.allocator.pools[Kind.FULL].num_free
    assert left == num_free - (NEW_PAGES if is_in else 0), "room to grow is left, not taken"
    worker.drain()
    assert not worker.seen(Retracted)
    assert worker.tokens["new"] == worker.expected("new")


@pytest.mark.parametrize("num_free", range(NEW_PAGES - 1, NEW_PAGES + NUM_DECODING + 2))
def test_a_hand_off_is_reserved_when_everyone_who_decodes_could_still_take_a_page(
    num_free: int,
) -> None:
    worker = decoding_with_free(num_free)
    if num_free >= NEW_PAGES + NUM_DECODING:
        worker.scheduler.reservations.reserve("res", NEW, worker.now)
        assert worker.scheduler.reservations.free("res")
    else:
        with pytest.raises(OutOfSlots):
            worker.scheduler.reservations.reserve("res", NEW, worker.now)
    worker.drain()


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one step at a time"])
def test_requests_are_pushed_back_from_the_newest_on(overlap: bool) -> None:
    """The longest and the one with the most pages is the oldest here: neither is what counts."""
    worker = ScheduledWorker(HYBRID, {Kind.FULL: 11, Kind.RECURRENT: 40}, overlap=overlap)
    for index, length in enumerate((7, 6, 5, 4)):
        worker.submit(request(HYBRID, f"r{index}", [index] * length, 18))
    running: list[str] = []
    num_heard, pushed_back = 0, []
    for _ in range(2000):
        planned = worker.plan()
        if not (worker.run_oldest() or planned):
            break
        for event in worker.events[num_heard:]:
            if isinstance(event, SequenceAdmitted):
                running.append(event.request_id)
            elif isinstance(event, Finished):
                running.remove(event.request_id)
            elif isinstance(event, Retracted):
                pushed_back.append((event.request_id, max(running)))
                running.remove(event.request_id)
        num_heard = len(worker.events)
    assert len(pushed_back) > 1, "the pools were meant to run out"
    assert all(name == newest for name, newest in pushed_back), pushed_back
