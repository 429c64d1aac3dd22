"""Hand-off between two schedulers, by bytes and absolute ranges; the host tier; snapshots."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.schedule import ALL_KINDS, HYBRID, ScheduledWorker, request, worker_for

from ferryman.cache.manifest import Kind
from ferryman.cache.resume import CopyState, HostView, LoadState, resume_set
from ferryman.cache.slots import Role
from ferryman.cache.units import HostUnit
from ferryman.engine.memory.transfer import digest_of
from ferryman.errors import InvalidRequest, OutOfSlots
from ferryman.schedule.batch import Sampled
from ferryman.schedule.events import Cached, LoadCorrupt, SequenceAdmitted, SequenceHeld
from ferryman.schedule.sequence import Goal

KINDS = {"hybrid": HYBRID, "all kinds": ALL_KINDS}


def hand_off(prefill: ScheduledWorker, decode: ScheduledWorker, request_id: str) -> int:
    """Moves a held request's units by absolute index; returns how many units travelled."""
    asked = prefill.requests[request_id]
    held = next(event for event in prefill.seen(SequenceHeld) if event.request_id == request_id)
    decode.requests[request_id] = asked
    sequence = decode.scheduler.reservations.reserve(request_id, asked, decode.now)
    needs = resume_set(decode.manifest, asked.prompt_len)
    spans = {Kind.FULL: (sequence.anchor_pages, needs.full.end)}
    if Kind.WINDOW in decode.manifest.kinds:
        spans[Kind.WINDOW] = (needs.window.first, needs.window.end)
    spans[Kind.RECURRENT] = (asked.prompt_len, asked.prompt_len + 1)
    moved = 0
    for kind, (first, end) in spans.items():
        theirs = dict(prefill.scheduler.units_at(request_id, kind, first, end))
        for index, handle in decode.scheduler.reservations.units_at(request_id, kind, first, end):
            source = prefill.engine.transfer.read(kind, theirs[index].slot)
            decode.engine.transfer.write(kind, handle.slot, 0, bytes(source))
            moved += 1
    decode.scheduler.adopt(request_id, held.first, decode.now)
    decode.collect()
    prefill.scheduler.release_held(request_id, prefill.now)
    prefill.collect()
    return moved


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(KINDS)),
    prompts=st.lists(
        st.builds(
            lambda n, tail: [1] * n + tail,
            st.integers(1, 20),
            st.lists(st.integers(0, 2), max_size=8),
        ),
        min_size=1,
        max_size=5,
    ),
    max_tokens=st.integers(1, 9),
)
def test_a_handed_off_request_draws_the_tokens_of_one_process(
    name: str, prompts: list[list[int]], max_tokens: int
) -> None:
    prefill, decode = worker_for(KINDS[name]), worker_for(KINDS[name])
    for index, prompt in enumerate(prompts):
        request_id = f"r{index}"
        prefill.submit(request(prefill.manifest, request_id, prompt, max_tokens), Goal.HAND_OFF)
        prefill.drain()
        hand_off(prefill, decode, request_id)
        decode.plan()
    decode.drain()
    for index in range(len(prompts)):
        assert decode.tokens[f"r{index}"] == decode.expected(f"r{index}")
    for side in (prefill, decode):
        for ledger in side.scheduler.ledgers().values():
            assert set(ledger.by_role) <= {"tree"}


@pytest.mark.parametrize(
    ("prefix_cache", "moved"),
    [(True, [8, 3, 1]), (False, [8, 8, 8])],
    ids=["a prefix cache of its own", "none"],
)
def test_decode_wants_only_what_it_does_not_hold(prefix_cache: bool, moved: list[int]) -> None:
    """Five pages, two of the window and the state; then the last page of each and the state, of a
    prompt on the same stem; and of the first one's next turn the state alone."""
    manifest = ALL_KINDS
    prefill = worker_for(manifest)
    sizes = {Kind.FULL: 40, Kind.WINDOW: 40, Kind.RECURRENT: 24}
    decode = ScheduledWorker(manifest, sizes, prefix_cache=prefix_cache)
    prompt, found = [1] * 18, []
    for index in range(2):
        prefill.submit(request(manifest, f"r{index}", [*prompt, index], 3), Goal.HAND_OFF)
        prefill.drain()
        found.append(hand_off(prefill, decode, f"r{index}"))
        decode.drain()
        assert decode.tokens[f"r{index}"] == decode.expected(f"r{index}")
    turn = [*prompt, 0, *decode.tokens["r0"][:1]]
    prefill.submit(request(manifest, "turn", turn, 3), Goal.HAND_OFF)
    prefill.drain()
    found.append(hand_off(prefill, decode, "turn"))
    decode.drain()
    assert decode.tokens["turn"] == decode.expected("turn")
    assert found == moved


def test_slots_of_a_reservation_stay_leased_until_it_is_freed() -> None:
    manifest = HYBRID
    decode = worker_for(manifest, full=6, recurrent=3)
    asked = request(manifest, "r0", [1] * 17, 4)
    decode.scheduler.reservations.reserve("res-1", asked, 1.0)
    assert decode.scheduler.ledgers()[Kind.FULL].by_role == {Role.TRANSFER_IN.value: 5}
    with pytest.raises(OutOfSlots):
        decode.scheduler.reservations.reserve("res-2", request(manifest, "r1", [2] * 17, 4), 2.0)
    assert decode.scheduler.reservations.free("res-1")
    assert not decode.scheduler.reservations.free("res-1")
    assert decode.scheduler.ledgers()[Kind.FULL].free == 6


def test_a_rejected_reservation_leaves_no_trace() -> None:
    manifest = HYBRID
    decode = worker_for(manifest, full=4, recurrent=3)
    before = decode.scheduler.ledgers()
    with pytest.raises(InvalidRequest, match="exceed the 16 tokens that fit"):
        decode.scheduler.check(request(manifest, "r0", [1] * 17, 4))
    assert decode.scheduler.ledgers() == before


def test_a_second_prompt_forks_off_the_snapshot_of_the_first() -> None:
    worker = worker_for(HYBRID)
    worker.submit(request(worker.manifest, "r0", [1] * 14, 4))
    worker.drain()
    for index in (1, 2):
        worker.submit(request(worker.manifest, f"r{index}", [1] * 14 + [index] * 5, 4))
    worker.drain()
    plans = {event.request_id: event.plan for event in worker.seen(SequenceAdmitted)}
    for index in (1, 2):
        assert plans[f"r{index}"].position == 12
        assert isinstance(plans[f"r{index}"].initialiser, CopyState)
        assert worker.tokens[f"r{index}"] == worker.expected(f"r{index}")


def test_a_conversation_resumes_at_the_track_of_its_last_turn() -> None:
    worker = worker_for(HYBRID)
    worker.submit(request(worker.manifest, "turn1", [1] * 5, 12))
    worker.drain()
    history = [1] * 5 + worker.tokens["turn1"]
    worker.submit(request(worker.manifest, "turn2", [*history, 7, 7, 7], 4))
    worker.drain()
    (plan,) = [event.plan for event in worker.seen(SequenceAdmitted) if event.request_id == "turn2"]
    assert plan.position == 16
    assert worker.tokens["turn2"] == worker.expected("turn2")


def store_on_host(worker: ScheduledWorker) -> tuple[bytearray, dict[tuple[Kind, int], HostUnit]]:
    """Copies everything the tree was given to a plain arena, as write-through does."""
    arena, units = bytearray(), {}
    for cached in worker.seen(Cached):
        for unit in cached.units:
            content = bytes(worker.engine.transfer.read(unit.kind, unit.handle.slot))
            host = HostUnit(
                unit.kind, unit.page_index, unit.key, len(arena), len(content), digest_of(content)
            )
            arena += content
            units[unit.kind, unit.page_index] = host
    return arena, units


@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_host_hit_on_another_worker_equals_recomputation(name: str) -> None:
    first, second = worker_for(KINDS[name]), worker_for(KINDS[name])
    first.submit(request(first.manifest, "r0", [1] * 18, 3))
    first.drain()
    arena, units = store_on_host(first)
    second.engine.host_tier.attach(memoryview(arena))
    second.submit(request(second.manifest, "r1", [1] * 18 + [2], 5), host=HostView(units))
    second.drain()
    (admitted,) = second.seen(SequenceAdmitted)
    assert admitted.plan.position == 16
    assert isinstance(admitted.plan.initialiser, LoadState)
    assert second.tokens["r1"] == second.expected("r1")


def test_corrupt_host_bytes_are_recomputed_not_answered() -> None:
    first, second = (worker_for(HYBRID) for _ in range(2))
    first.submit(request(first.manifest, "r0", [1] * 18, 3))
    first.drain()
    arena, units = store_on_host(first)
    flipped = units[Kind.RECURRENT, 3].offset
    arena[flipped] ^= 1
    second.engine.host_tier.attach(memoryview(arena))
    second.submit(request(second.manifest, "r1", [1] * 18 + [2], 5), host=HostView(units))
    second.drain()
    assert [event.request_id for event in second.seen(LoadCorrupt)] == ["r1"]
    assert [event.plan.position for event in second.seen(SequenceAdmitted)] == [16, 0]
    assert second.tokens["r1"] == second.expected("r1")


def test_a_first_token_that_ends_the_request_frees_it_at_once() -> None:
    manifest = HYBRID
    decode = ScheduledWorker(manifest)  # nothing is handed over, so no slot holds its state
    asked = request(manifest, "r0", np.ones(6, dtype=int).tolist(), 1)
    decode.scheduler.reservations.reserve("res", asked, 1.0)
    decode.scheduler.adopt("res", Sampled(3, {}), 2.0)
    decode.collect()
    assert not decode.plan()
    assert set(decode.scheduler.ledgers()[Kind.RECURRENT].by_role) <= {"tree"}
