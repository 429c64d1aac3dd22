"""What the router believes of workers, as values: who is there, what they hold, who is lost."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ferryman.cache.manifest import Kind
from ferryman.wire.beats import Beat, ServedState
from ferryman_router.fleet import AskSnapshot, Fleet, Joined, Lost, WorkerName
from ferryman_router.holdings import CacheChange, Holdings, Snapshot

STATE = ServedState("f", 4, "d", (Kind.FULL, Kind.RECURRENT))
KEYS = tuple(bytes([i]) * 16 for i in range(8))
BEAT = Beat("decode", "decode-00000001", 7, "a:1", True, STATE, 100)
NAME = WorkerName("decode-00000001", 7)


def test_a_first_beat_joins_and_asks_for_a_snapshot() -> None:
    fleet = Fleet(3.0)
    assert fleet.hear_beat(BEAT, 0.0) == (Joined(BEAT), AskSnapshot(NAME))
    assert fleet.hear_beat(BEAT, 1.0) == ()
    assert [worker.name for worker in fleet.usable("decode", 1.0)] == [NAME]


def test_silence_longer_than_the_timeout_is_a_loss() -> None:
    fleet = Fleet(3.0)
    fleet.hear_beat(BEAT, 0.0)
    assert fleet.expire(3.0) == ()
    assert fleet.expire(3.1) == (Lost(NAME, "decode", "silent"),)
    assert fleet.get(NAME) is None


def test_silence_does_not_count_while_nobody_can_be_heard() -> None:
    fleet = Fleet(3.0)
    fleet.hear_beat(BEAT, 0.0)
    fleet.forgive_silence(100.0)
    assert fleet.expire(102.0) == ()


def test_a_new_epoch_is_a_new_worker_and_the_old_one_is_lost() -> None:
    fleet = Fleet(3.0)
    fleet.hear_beat(BEAT, 0.0)
    reborn = replace(BEAT, epoch=8)
    lost, joined, asked = fleet.hear_beat(reborn, 0.5)
    assert (lost, joined) == (Lost(NAME, "decode", "restarted"), Joined(reborn))
    assert asked == AskSnapshot(WorkerName(BEAT.worker_id, 8))
    assert fleet.get(NAME) is None


def test_another_worker_at_the_same_address_ends_the_first() -> None:
    fleet = Fleet(3.0)
    fleet.hear_beat(BEAT, 0.0)
    effects = fleet.hear_beat(replace(BEAT, worker_id="decode-00000002"), 0.5)
    assert Lost(NAME, "decode", "replaced") in effects


def test_of_two_lives_of_a_host_cache_the_one_heard_of_last_counts() -> None:
    """The one that was killed is only silent yet, and listened somewhere else."""
    fleet = Fleet(3.0)
    old, new = (
        replace(BEAT, role="hostcache", worker_id=f"hostcache-{name}", address=name, node="n1")
        for name in ("bbb", "aaa")
    )
    fleet.hear_beat(old, 0.0)
    fleet.hear_beat(new, 1.0)
    assert fleet.host_caches() == {"n1": new}
    fleet.hear_beat(old, 2.0)
    assert fleet.host_caches() == {"n1": old}


def test_who_drains_is_suspect_or_full_gets_nothing_new() -> None:
    fleet = Fleet(3.0)
    fleet.hear_beat(BEAT, 0.0)
    fleet.suspect(NAME)
    assert fleet.usable("decode", 0.0) == ()
    fleet.hear_beat(BEAT, 0.5)
    assert fleet.usable("decode", 0.5)
    fleet.avoid(NAME, 1.0)
    assert fleet.usable("decode", 0.9) == ()
    assert fleet.usable("decode", 1.0)
    fleet.hear_beat(replace(BEAT, is_ready=False), 1.0)
    assert fleet.usable("decode", 1.0) == ()


def _change(sequence: int, *stored: bytes) -> CacheChange:
    return CacheChange(sequence, {}, {Kind.FULL: stored})


def test_a_gap_asks_for_a_snapshot_once_and_what_follows_is_kept() -> None:
    fleet = Fleet(3.0)
    fleet.hear_beat(BEAT, 0.0)
    fleet.hear_snapshot(NAME, Snapshot(0, {}))
    assert fleet.hear_change(NAME, _change(1, KEYS[0])) == ()
    assert fleet.hear_change(NAME, _change(3, KEYS[2])) == (AskSnapshot(NAME),)
    assert fleet.hear_change(NAME, _change(4, KEYS[3])) == ()
    assert fleet.hear_snapshot(NAME, Snapshot(2, {Kind.FULL: KEYS[:2]})) == ()
    worker = fleet.get(NAME)
    assert worker is not None
    assert worker.holdings.depth(KEYS) == 4


def test_a_snapshot_that_is_too_old_asks_again() -> None:
    fleet = Fleet(3.0)
    fleet.hear_beat(BEAT, 0.0)
    fleet.hear_change(NAME, _change(5, KEYS[4]))
    assert fleet.hear_snapshot(NAME, Snapshot(3, {})) == (AskSnapshot(NAME),)
    assert fleet.hear_snapshot(NAME, Snapshot(4, {Kind.FULL: KEYS[:4]})) == ()


def test_events_of_another_life_are_not_heard() -> None:
    fleet = Fleet(3.0)
    fleet.hear_beat(BEAT, 0.0)
    old = WorkerName(BEAT.worker_id, 6)
    assert fleet.hear_change(old, _change(9, KEYS[0])) == ()
    assert fleet.hear_snapshot(old, Snapshot(9, {Kind.FULL: KEYS})) == ()
    worker = fleet.get(NAME)
    assert worker is not None
    assert worker.holdings.usable_tokens(KEYS, 30) == 0


def _holdings(kinds: tuple[Kind, ...], window_len: int = 0, **held: tuple[bytes, ...]) -> Holdings:
    holdings = Holdings(kinds, window_len, 4)
    holdings.replace(Snapshot(0, {Kind(kind): keys for kind, keys in held.items()}))
    return holdings


def test_the_usable_prefix_is_the_least_over_the_kinds() -> None:
    kinds = (Kind.FULL, Kind.RECURRENT)
    holdings = _holdings(kinds, full=KEYS[:6], recurrent=(KEYS[1], KEYS[3], KEYS[7]))
    assert holdings.usable_tokens(KEYS, 32) == 16
    assert holdings.usable_tokens(KEYS, 16) == 8  # one token is always computed
    assert _holdings(kinds, full=KEYS).usable_tokens(KEYS, 32) == 0


def test_a_window_needs_only_the_pages_it_meets() -> None:
    kinds = (Kind.FULL, Kind.WINDOW)
    holdings = _holdings(kinds, 6, full=KEYS, window=(KEYS[3], KEYS[4], KEYS[6]))
    assert holdings.usable_tokens(KEYS, 33) == 20


@given(depth=st.integers(0, 8), removed=st.integers(0, 8))
def test_bisection_finds_how_far_the_pages_go(depth: int, removed: int) -> None:
    holdings = _holdings((Kind.FULL,), full=KEYS[:depth])
    holdings.apply(CacheChange(1, {Kind.FULL: KEYS[removed:]}, {}))
    assert holdings.depth(KEYS) == min(depth, removed)


@given(order=st.permutations(range(1, 7)), snapshot_at=st.integers(0, 6))
def test_events_in_any_order_and_a_snapshot_end_in_the_truth(
    order: list[int], snapshot_at: int
) -> None:
    holdings = Holdings((Kind.FULL,), 0, 4)
    holdings.replace(Snapshot(snapshot_at, {Kind.FULL: KEYS[:snapshot_at]}))
    for sequence in order:
        holdings.apply(_change(sequence, KEYS[sequence - 1]))
    assert holdings.depth(KEYS) == 6


def test_what_was_sent_counts_until_it_is_settled_or_a_beat_has_counted_it() -> None:
    fleet = Fleet(3.0)
    fleet.hear_beat(BEAT, 0.0)
    fleet.sent(NAME, 30)
    fleet.sent(NAME, 12)
    fleet.settled(NAME, 30)
    worker = fleet.get(NAME)
    assert worker is not None
    assert (worker.num_requests, worker.num_queued, worker.queue_tokens) == (1, 1, 12)


def test_what_a_beat_has_counted_and_is_settled_since_counts_no_more() -> None:
    fleet = Fleet(3.0)
    fleet.hear_beat(BEAT, 0.0)
    fleet.sent(NAME, 12)
    fleet.sent(NAME, 20)
    fleet.hear_beat(replace(BEAT, num_running=1, num_queued=1, queue_tokens=27), 1.0)
    fleet.settled(NAME, 12)
    worker = fleet.get(NAME)
    assert worker is not None
    assert (worker.num_requests, worker.num_queued, worker.queue_tokens) == (1, 0, 15)
    fleet.settled(NAME, 20)
    assert (worker.num_requests, worker.num_queued, worker.queue_tokens) == (0, 0, 0)
    fleet.hear_beat(replace(BEAT, num_running=2), 2.0)
    assert (worker.num_requests, worker.queue_tokens) == (2, 0)
