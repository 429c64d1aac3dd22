"""A reserved row holds one working slot; tracks and scratch are taken when its request runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.harness.schedule import HYBRID, RandomDrafts, ScheduledWorker, WatchedWorker, request
from tests.schedule.test_hand_off import hand_off

from ferryman.cache.capacity import Concurrency
from ferryman.cache.manifest import Kind
from ferryman.schedule.events import Finished, RequestFailed, Retracted
from ferryman.schedule.sequence import Goal, RunningSequence
from ferryman.settings.engine import EngineOptions
from ferryman.settings.workers import DecodeSettings

RESERVED = 4  # of the schedules of the harness
ALL_RIGHT = RandomDrafts(3, chance=1.0)
LONG = 40


def in_the_least_pool(max_running: int, drafts: RandomDrafts = ALL_RIGHT) -> ScheduledWorker:
    """A decode worker that has as many recurrent slots as the inequality asks for."""
    needed = Concurrency(max_running, RESERVED, 2, drafts.num_tokens).recurrent_slots
    sizes = {Kind.FULL: 160, Kind.RECURRENT: needed}
    return WatchedWorker(HYBRID, sizes, max_running=max_running, drafting=drafts)


def prompts(number: int, max_tokens: int = LONG) -> ScheduledWorker:
    """A prefill worker that holds so many prompts, ready to be handed off."""
    sizes = {Kind.FULL: 200, Kind.RECURRENT: 200}
    prefill = ScheduledWorker(HYBRID, sizes, max_running=number, chunk_tokens=64)
    for index in range(number):
        asked = request(HYBRID, f"r{index}", [index + 1] * 5, max_tokens)
        prefill.submit(asked, Goal.HAND_OFF)
    prefill.drain()
    return prefill


def sequence_of(worker: ScheduledWorker, name: str) -> RunningSequence:
    return worker.scheduler.sequences.by_id[name]


def step(worker: ScheduledWorker, times: int = 1) -> None:
    for _ in range(times):
        worker.plan()
        worker.run_oldest()


def test_32_running_and_8_reserved_with_4_drafts_take_232_slots(tmp_path: Path) -> None:
    """32 × (1 working + 2 tracks + 4 scratch), and 8 working slots."""
    worker = EngineOptions(model=tmp_path, draft="ngram", draft_tokens=4)
    concurrency = DecodeSettings(worker=worker).engine.concurrency
    assert (concurrency.max_running, concurrency.max_prealloc) == (32, 8)
    assert concurrency.recurrent_slots == 232
    assert concurrency.inequality(300) == (
        "32 running × (1 + 2 tracking + 4 scratch) + 8 preallocated = 232 recurrent slots needed, "
        "300 given"
    )


def test_a_reserved_row_holds_its_working_slot_alone_and_takes_the_rest_when_it_runs() -> None:
    prefill, decode = prompts(1), in_the_least_pool(1)
    hand_off(prefill, decode, "r0")
    sequence = sequence_of(decode, "r0")
    assert sequence.num_states == 1, "taking it over allocates nothing"
    step(decode)
    assert len(sequence.scratch) == 3
    step(decode, 4)
    assert sequence.tracks
    assert sequence.num_states <= 6
    decode.drain()
    assert decode.tokens["r0"] == decode.expected("r0")


@pytest.mark.parametrize("max_running", [1, 2, 5])
def test_every_row_is_promised_its_working_slot_whatever_the_running_ones_take(
    max_running: int,
) -> None:
    """All rows decode at once, in the least pool; each hand-off comes when those before it have
    taken all that they may."""
    number = max_running + RESERVED
    prefill, decode = prompts(number), in_the_least_pool(max_running)
    for index in range(number):
        hand_off(prefill, decode, f"r{index}")
        step(decode, 3)
        used = sum(s.num_states for s in decode.scheduler.sequences.with_slots())
        rows_left = number - index - 1
        assert used + min(rows_left, RESERVED) <= decode.sizes[Kind.RECURRENT]
    decode.drain()
    assert not decode.seen(RequestFailed)
    assert not decode.seen(Retracted)
    assert len(decode.seen(Finished)) == number
    for index in range(number):
        assert decode.tokens[f"r{index}"] == decode.expected(f"r{index}")


def test_a_running_request_has_all_its_slots_beside_rows_that_are_reserved() -> None:
    """Row by row: what is reserved has its working slot already."""
    prefill, decode = prompts(1), in_the_least_pool(1)
    for index in range(RESERVED):
        asked = request(HYBRID, f"res{index}", [9, index, 1], 4)
        decode.scheduler.reservations.reserve(f"res{index}", asked, decode.now)
    hand_off(prefill, decode, "r0")
    most, sequence = 0, sequence_of(decode, "r0")
    while decode.plan() or decode.queued:
        most = max(most, sequence.num_states)
        decode.run_oldest()
    assert most == 1 + 2 + 3
    reserved = decode.scheduler.sequences.reserved.values()
    assert [held.num_states for held in reserved] == [1] * RESERVED
    assert decode.tokens["r0"] == decode.expected("r0")


def test_a_request_that_found_no_scratch_drafts_when_another_one_has_left() -> None:
    prefill, decode = prompts(1 + RESERVED), in_the_least_pool(1)
    for index in range(1 + RESERVED):
        hand_off(prefill, decode, f"r{index}")
        step(decode, 2)
    last = sequence_of(decode, f"r{RESERVED}")
    assert last.scratch == [], "the first one has all that is left of the rows' working slots"
    decode.scheduler.cancel("r0", decode.now)
    decode.collect()
    step(decode, 6)
    taken = {s.request_id: len(s.scratch) for s in decode.scheduler.sequences.with_slots()}
    assert sum(taken.values()) > 0, taken
    decode.drain()
    for index in range(1, 1 + RESERVED):
        assert decode.tokens[f"r{index}"] == decode.expected(f"r{index}")
