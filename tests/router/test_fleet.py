"""The router's beliefs about workers, as values: which are there, what they hold, who is lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ferryman.cache.manifest import Kind, ResumeShape
from ferryman.wire.codec.caches import CacheEvent, CacheSnapshot
from ferryman.wire.nats.heartbeat import Heartbeat, ServedState
from ferryman_router.routing.fleet import (
    UNREACHABLE,
    AskSnapshot,
    Fleet,
    WorkerJoined,
    WorkerLeft,
    WorkerName,
    WorkerUnproven,
)
from ferryman_router.routing.prefix_sources import MAX_WAITING, WorkerCacheIndex

STATE = ServedState("f", 4, "d", (Kind.FULL, Kind.RECURRENT))
KEYS = tuple(bytes([i]) * 16 for i in range(8))
BEAT = Heartbeat("decode", "decode-00000001", 7, "a:1", True, STATE, 100)
NAME = WorkerName("decode-00000001", 7)


def test_a_first_beat_joins_and_asks_for_a_snapshot() -> None:
    fleet = Fleet(3.0)
    assert fleet.on_heartbeat(BEAT, 0.0) == (WorkerJoined(BEAT), AskSnapshot(NAME))
    assert fleet.on_heartbeat(BEAT, 1.0) == ()
    assert [worker.name for worker in fleet.usable("decode", 1.0)] == [NAME]


def test_silence_longer_than_the_timeout_is_a_loss() -> None:
    fleet = Fleet(3.0)
    fleet.on_heartbeat(BEAT, 0.0)
    assert fleet.expire(3.0) == ()
    assert fleet.expire(3.1) == (WorkerLeft(NAME, "decode", "silent"),)
    assert fleet.get(NAME) is None


def test_silence_does_not_count_while_nobody_can_be_heard() -> None:
    fleet = Fleet(3.0)
    fleet.on_heartbeat(BEAT, 0.0)
    fleet.reset_timeouts(100.0)
    assert fleet.expire(102.0) == ()


def test_silence_does_not_count_while_this_process_stood_still() -> None:
    fleet = Fleet(3.0)
    fleet.on_heartbeat(BEAT, 0.0)
    assert fleet.expire(0.25) == ()
    assert fleet.expire(20.0) == (), "its beats of the meantime are not read yet"
    for tenth in range(200, 230):
        assert fleet.expire(tenth / 10) == ()
    assert fleet.expire(23.1) == (WorkerLeft(NAME, "decode", "silent"),)


def test_a_life_that_was_unreachable_is_believed_once_it_was_reached() -> None:
    fleet = Fleet(3.0)
    fleet.on_heartbeat(BEAT, 0.0)
    assert fleet.lose(NAME, UNREACHABLE) == (WorkerLeft(NAME, "decode", UNREACHABLE),)
    assert fleet.lose(NAME, UNREACHABLE) == (), "one death is one event"
    assert fleet.on_heartbeat(BEAT, 1.0) == (WorkerUnproven(BEAT),)
    assert fleet.get(NAME) is None
    assert fleet.welcome(BEAT, 2.0) == (WorkerJoined(BEAT), AskSnapshot(NAME))
    assert fleet.welcome(BEAT, 2.0) == (), "a late word about what is over"
    assert fleet.on_heartbeat(BEAT, 3.0) == ()


def test_a_new_life_is_not_held_to_what_the_old_one_was() -> None:
    fleet = Fleet(3.0)
    fleet.on_heartbeat(BEAT, 0.0)
    fleet.lose(NAME, UNREACHABLE)
    reborn = replace(BEAT, epoch=8)
    assert WorkerJoined(reborn) in fleet.on_heartbeat(reborn, 1.0)
    assert fleet.welcome(BEAT, 1.5) == ()
    assert fleet.get(WorkerName(BEAT.worker_id, 8)) is not None


def test_what_was_unreachable_and_fell_silent_is_forgotten() -> None:
    fleet = Fleet(3.0)
    fleet.on_heartbeat(BEAT, 0.0)
    fleet.lose(NAME, UNREACHABLE)
    for tenth in range(35):
        fleet.expire(tenth / 10)
    assert WorkerJoined(BEAT) in fleet.on_heartbeat(BEAT, 4.0)


def test_a_new_epoch_is_a_new_worker_and_the_old_one_is_lost() -> None:
    fleet = Fleet(3.0)
    fleet.on_heartbeat(BEAT, 0.0)
    reborn = replace(BEAT, epoch=8)
    lost, joined, asked = fleet.on_heartbeat(reborn, 0.5)
    assert (lost, joined) == (WorkerLeft(NAME, "decode", "restarted"), WorkerJoined(reborn))
    assert asked == AskSnapshot(WorkerName(BEAT.worker_id, 8))
    assert fleet.get(NAME) is None


def test_another_worker_at_the_same_address_ends_the_first_once_it_is_proven() -> None:
    fleet = Fleet(3.0)
    fleet.on_heartbeat(BEAT, 0.0)
    other = replace(BEAT, worker_id="decode-00000002")
    assert fleet.on_heartbeat(other, 0.5) == (WorkerUnproven(other),)
    assert fleet.on_heartbeat(other, 1.0) == (WorkerUnproven(other),), "it may say so as often"
    assert fleet.get(NAME) is not None, "a claim drives nobody out"
    effects = fleet.welcome(other, 1.5)
    assert effects[:2] == (WorkerLeft(NAME, "decode", "replaced"), WorkerJoined(other))
    assert fleet.on_heartbeat(BEAT, 2.0) == (WorkerUnproven(BEAT),), "a late beat"


def test_of_two_lives_of_a_host_cache_the_one_heard_of_last_counts() -> None:
    """The one that was killed is only silent yet, and listened somewhere else."""
    fleet = Fleet(3.0)
    old, new = (
        replace(BEAT, role="hostcache", worker_id=f"hostcache-{name}", address=name, node="n1")
        for name in ("bbb", "aaa")
    )
    fleet.on_heartbeat(old, 0.0)
    fleet.on_heartbeat(new, 1.0)
    assert fleet.host_caches() == {"n1": new}
    fleet.on_heartbeat(old, 2.0)
    assert fleet.host_caches() == {"n1": old}


def test_who_drains_is_suspect_or_full_gets_nothing_new() -> None:
    fleet = Fleet(3.0)
    fleet.on_heartbeat(BEAT, 0.0)
    fleet.suspect(NAME)
    assert fleet.usable("decode", 0.0) == ()
    fleet.on_heartbeat(BEAT, 0.5)
    assert fleet.usable("decode", 0.5)
    fleet.avoid(NAME, 1.0)
    assert fleet.usable("decode", 0.9) == ()
    assert fleet.usable("decode", 1.0)
    fleet.on_heartbeat(replace(BEAT, is_ready=False), 1.0)
    assert fleet.usable("decode", 1.0) == ()


def test_a_worker_in_quarantine_gets_requests_only_while_there_is_no_other() -> None:
    fleet = Fleet(3.0)
    fleet.on_heartbeat(replace(BEAT, is_quarantined=True), 0.0)
    assert [worker.name for worker in fleet.usable("decode", 0.0)] == [NAME]
    other = replace(BEAT, worker_id="decode-00000002", address="b:1")
    fleet.on_heartbeat(other, 0.1)
    assert [worker.beat for worker in fleet.usable("decode", 0.1)] == [other]
    fleet.on_heartbeat(replace(other, is_ready=False), 0.2)
    assert [worker.name for worker in fleet.usable("decode", 0.2)] == [NAME]


def _change(sequence: int, *stored: bytes, name: WorkerName = NAME) -> CacheEvent:
    return CacheEvent(name.worker_id, name.epoch, sequence, {}, {Kind.FULL: stored})


def _snapshot(sequence: int, held: Mapping[Kind, tuple[bytes, ...]]) -> CacheSnapshot:
    return CacheSnapshot(NAME.worker_id, NAME.epoch, sequence, held)


def test_a_gap_asks_for_a_snapshot_once_and_what_follows_is_kept() -> None:
    fleet = Fleet(3.0)
    fleet.on_heartbeat(BEAT, 0.0)
    fleet.on_cache_snapshot(NAME, _snapshot(0, {}))
    assert fleet.on_cache_event(_change(1, KEYS[0])) == ()
    assert fleet.on_cache_event(_change(3, KEYS[2])) == (AskSnapshot(NAME),)
    assert fleet.on_cache_event(_change(4, KEYS[3])) == ()
    assert fleet.on_cache_snapshot(NAME, _snapshot(2, {Kind.FULL: KEYS[:2]})) == ()
    worker = fleet.get(NAME)
    assert worker is not None
    assert worker.cache_index.depth(KEYS) == 4


def test_a_snapshot_that_is_too_old_asks_again() -> None:
    fleet = Fleet(3.0)
    fleet.on_heartbeat(BEAT, 0.0)
    fleet.on_cache_event(_change(5, KEYS[4]))
    assert fleet.on_cache_snapshot(NAME, _snapshot(3, {})) == (AskSnapshot(NAME),)
    assert fleet.on_cache_snapshot(NAME, _snapshot(4, {Kind.FULL: KEYS[:4]})) == ()


def test_events_of_another_life_are_not_heard() -> None:
    fleet = Fleet(3.0)
    fleet.on_heartbeat(BEAT, 0.0)
    old = WorkerName(BEAT.worker_id, 6)
    assert fleet.on_cache_event(_change(9, KEYS[0], name=old)) == ()
    assert fleet.on_cache_snapshot(old, _snapshot(9, {Kind.FULL: KEYS})) == ()
    worker = fleet.get(NAME)
    assert worker is not None
    assert worker.cache_index.usable_tokens(KEYS, 30) == 0


def _cache_index(
    kinds: tuple[Kind, ...], window_len: int = 0, **held: tuple[bytes, ...]
) -> WorkerCacheIndex:
    cache_index = WorkerCacheIndex(ResumeShape(4, window_len, frozenset(kinds)))
    cache_index.replace(_snapshot(0, {Kind(kind): keys for kind, keys in held.items()}))
    return cache_index


def test_the_usable_prefix_is_the_least_over_the_kinds() -> None:
    kinds = (Kind.FULL, Kind.RECURRENT)
    cache_index = _cache_index(kinds, full=KEYS[:6], recurrent=(KEYS[1], KEYS[3], KEYS[7]))
    assert cache_index.usable_tokens(KEYS, 32) == 16
    assert cache_index.usable_tokens(KEYS, 16) == 8  # one token is always computed
    assert _cache_index(kinds, full=KEYS).usable_tokens(KEYS, 32) == 0


def test_a_window_needs_only_the_pages_it_meets() -> None:
    kinds = (Kind.FULL, Kind.WINDOW)
    cache_index = _cache_index(kinds, 6, full=KEYS, window=(KEYS[3], KEYS[4], KEYS[6]))
    assert cache_index.usable_tokens(KEYS, 33) == 20


@given(depth=st.integers(0, 8), removed=st.integers(0, 8))
def test_bisection_finds_how_far_the_pages_go(depth: int, removed: int) -> None:
    cache_index = _cache_index((Kind.FULL,), full=KEYS[:depth])
    event = CacheEvent(NAME.worker_id, NAME.epoch, 1, removed={Kind.FULL: KEYS[removed:]})
    cache_index.apply(event)
    assert cache_index.depth(KEYS) == min(depth, removed)


@given(order=st.permutations(range(1, 7)), snapshot_at=st.integers(0, 6))
def test_events_in_any_order_and_a_snapshot_end_in_the_truth(
    order: list[int], snapshot_at: int
) -> None:
    cache_index = WorkerCacheIndex(ResumeShape(4, 0, frozenset({Kind.FULL})))
    cache_index.replace(_snapshot(snapshot_at, {Kind.FULL: KEYS[:snapshot_at]}))
    for sequence in order:
        cache_index.apply(_change(sequence, KEYS[sequence - 1]))
    assert cache_index.depth(KEYS) == 6


def test_so_many_events_wait_for_one_that_is_missing_and_no_more() -> None:
    cache_index = WorkerCacheIndex(ResumeShape(4, 0, frozenset({Kind.FULL})))
    cache_index.replace(_snapshot(0, {Kind.FULL: ()}))
    for sequence in range(2, MAX_WAITING + 4):
        cache_index.apply(_change(sequence, KEYS[0]))
    assert len(cache_index._waiting) == MAX_WAITING
    cache_index.apply(_change(1, KEYS[1]))
    assert cache_index._sequence == 0, "the snapshot that is asked for tells of it"


def loaded(fleet: Fleet) -> tuple[int, int]:
    worker = fleet.get(NAME)
    assert worker is not None
    return worker.num_requests, worker.queue_tokens


def test_a_claim_counts_until_it_is_released_and_a_second_release_is_absorbed() -> None:
    fleet = Fleet(3.0)
    fleet.on_heartbeat(BEAT, 0.0)
    fleet.claim(NAME, "a.1", 30)
    fleet.claim(NAME, "b.1", 12)
    fleet.release(NAME, "a.1")
    fleet.release(NAME, "a.1")
    assert loaded(fleet) == (1, 12)


def test_a_beat_that_has_not_counted_a_claim_does_not_take_it_away() -> None:
    fleet = Fleet(3.0)
    fleet.on_heartbeat(BEAT, 0.0)
    fleet.claim(NAME, "a.1", 30)
    fleet.on_heartbeat(BEAT, 1.0)
    assert loaded(fleet) == (1, 30), "it is on its way: the worker did not know of it"


def test_what_is_computed_is_no_work_that_waits() -> None:
    fleet = Fleet(3.0)
    fleet.on_heartbeat(BEAT, 0.0)
    fleet.claim(NAME, "a.1", 30)
    fleet.computed(NAME, "a.1", 10)
    assert loaded(fleet) == (1, 10)
    fleet.computed(NAME, "a.1", 25)
    fleet.computed(NAME, "unknown.1", 0)
    assert loaded(fleet) == (1, 10), "words that come late change nothing"


def test_what_a_beat_has_counted_and_is_released_since_counts_no_more() -> None:
    fleet = Fleet(3.0)
    fleet.on_heartbeat(BEAT, 0.0)
    fleet.claim(NAME, "a.1", 12)
    fleet.claim(NAME, "b.1", 20)
    fleet.on_heartbeat(replace(BEAT, num_running=2, num_queued=1, queue_tokens=47), 1.0)
    assert loaded(fleet) == (3, 47), "another router has one there, too"
    fleet.release(NAME, "a.1")
    assert loaded(fleet) == (2, 35)
    fleet.release(NAME, "b.1")
    assert loaded(fleet) == (1, 15)
    fleet.on_heartbeat(replace(BEAT, num_running=2), 2.0)
    assert loaded(fleet) == (2, 0)


def test_a_worker_that_had_no_room_is_asked_again_when_something_ends_there() -> None:
    fleet = Fleet(3.0)
    fleet.on_heartbeat(BEAT, 0.0)
    fleet.claim(NAME, "a.1", 12)
    fleet.avoid(NAME, 1.0)
    fleet.release(NAME, "unknown.1")
    assert not fleet.usable("decode", 0.5)
    fleet.release(NAME, "a.1")
    assert fleet.usable("decode", 0.5)
