"""The fake engine detects wrong state: each kind of error is planted here."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doubles.fake_engine import FakeEngine, WrongStamp
from tests.doubles.stamps import fake_manifest, fake_tokens
from tests.engine.plans import Guest, decode, load, prefill, with_snapshots

from ferryman.cache.keys import as_token_ids
from ferryman.cache.manifest import Kind
from ferryman.schedule.batch import RowSeed, SlotCopy, SlotOps, SlotSnapshot, StepOutcome
from ferryman.schedule.request import SamplingParams

PAGE = 4
WINDOW = 6
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
PAGES = {Kind.FULL: (7, 3, 5, 6), Kind.WINDOW: (1, 2, 3, 4)}
ANNA = Guest("anna", PROMPT, row=0, working_slot=2, pages=PAGES)
CLEAR = SlotOps(clears=(2,))


def engine() -> FakeEngine:
    kinds = (Kind.FULL, Kind.WINDOW, Kind.RECURRENT)
    manifest = fake_manifest(PAGE, kinds=kinds, window_len=WINDOW)
    sizes = {Kind.FULL: 12, Kind.WINDOW: 12, Kind.RECURRENT: 8}
    return FakeEngine(manifest, sizes, max_rows=3, max_len=40)


def token(outcome: StepOutcome) -> int:
    return outcome.sampled[0].token_id


def test_tokens_are_a_function_of_the_prefix() -> None:
    fake = engine()
    fake.run(prefill(0, [(ANNA, 0, 8)], CLEAR))
    first = fake.run(prefill(1, [(ANNA, 8, 10)]))
    second = fake.run(decode(2, [(ANNA, 10)]))
    assert [token(first), token(second)] == fake_tokens(PROMPT, 2, fake.vocab_size)
    other = fake_tokens([*PROMPT[:-1], 4], 2, fake.vocab_size)
    assert other != fake_tokens(PROMPT, 2, fake.vocab_size)


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(1, len(PROMPT) - 1)))
def test_every_chunking_says_the_same(cuts: set[int]) -> None:
    fake, edges = engine(), [0, *sorted(cuts), len(PROMPT)]
    for step_id, (start, end) in enumerate(itertools.pairwise(edges)):
        outcome = fake.run(
            prefill(step_id, [(ANNA, start, end)], CLEAR if start == 0 else SlotOps())
        )
    assert token(outcome) == fake_tokens(PROMPT, 1, fake.vocab_size)[0]


def test_a_working_slot_that_nobody_cleared_is_noticed() -> None:
    """Defect 2: the clear of a replacement slot stayed behind when its batch ran."""
    with pytest.raises(WrongStamp, match="anna: recurrent slot 2 holds the state ffff"):
        engine().run(prefill(0, [(ANNA, 0, 10)]))


def test_a_page_of_another_prompt_is_noticed() -> None:
    fake = engine()
    other = replace(ANNA, tokens=[9, *PROMPT[1:]], request_id="bert", row=1, working_slot=3)
    fake.run(prefill(0, [(ANNA, 0, 8)], CLEAR))
    fake.run(prefill(1, [(other, 0, 4)], SlotOps(clears=(3,))))
    with pytest.raises(WrongStamp, match="anna: full slot 7 does not hold the state of position 0"):
        fake.run(prefill(2, [(ANNA, 8, 10)]))


def test_a_stale_page_of_a_freed_slot_is_noticed() -> None:
    fake = engine()
    fake.run(prefill(0, [(ANNA, 0, 10)], CLEAR))
    moved = ANNA.with_pages(Kind.FULL, (7, 9, 5, 6))
    with pytest.raises(WrongStamp, match=r"full slot 9 .* position 4"):
        fake.run(decode(1, [(moved, 10)]))


def test_pages_behind_the_window_may_be_gone_and_those_within_may_not() -> None:
    fake = engine()
    fake.run(prefill(0, [(ANNA, 0, 10)], CLEAR))
    # The token at 10 sees [5, 10): its first window page is page 1.
    fake.run(decode(1, [(ANNA.with_pages(Kind.WINDOW, (-1, 2, 3, 4)), 10)]))
    with pytest.raises(WrongStamp, match="no window page for position 6"):
        fake.run(decode(2, [(ANNA.with_pages(Kind.WINDOW, (-1, -1, 3, 4)), 11)]))


def test_a_snapshot_can_be_resumed_and_only_at_its_position() -> None:
    fake = engine()
    fake.run(with_snapshots(prefill(0, [(ANNA, 0, 10)], CLEAR), (4, 5), (8, 6)))
    seed = RowSeed(1, as_token_ids(PROMPT[:8]))
    fork = replace(ANNA, request_id="fork", row=1, working_slot=4)
    resumed = fake.run(
        prefill(1, [(fork, 8, 10)], SlotOps(copies=(SlotCopy(6, 4),), seeds=(seed,)))
    )
    assert token(resumed) == fake_tokens(PROMPT, 1, fake.vocab_size)[0]
    with pytest.raises(WrongStamp, match=r"of position 4, not .* of position 8"):
        fake.run(prefill(2, [(fork, 8, 10)], SlotOps(copies=(SlotCopy(5, 4),), seeds=(seed,))))


def test_a_row_that_was_not_seeded_is_noticed() -> None:
    fake = engine()
    fake.run(with_snapshots(prefill(0, [(ANNA, 0, 10)], CLEAR), (8, 6)))
    fork = replace(ANNA, request_id="fork", row=1, working_slot=4)
    with pytest.raises(WrongStamp, match="row 1 knows 0 of at most 40 tokens"):
        fake.run(prefill(1, [(fork, 8, 10)], SlotOps(copies=(SlotCopy(6, 4),))))


def test_a_decode_snapshot_filed_under_another_length_is_noticed() -> None:
    """Defect 42: the state of depth d was inserted under the key of another length."""
    fake = engine()
    fake.run(prefill(0, [(ANNA, 0, 10)], CLEAR))
    fake.run(decode(1, [(ANNA, 10)]))
    with pytest.raises(WrongStamp, match="of a state at 12"):
        fake.run(decode(2, [(ANNA, 11)], SlotOps(snapshots=(SlotSnapshot(2, 5, 11),))))


def test_a_snapshot_off_the_page_grid_is_noticed() -> None:
    with pytest.raises(WrongStamp, match="does not fit"):
        engine().run(with_snapshots(prefill(0, [(ANNA, 0, 10)], CLEAR), (6, 5)))


def test_stamps_travel_with_the_bytes() -> None:
    """A hand-off: another engine goes on with nothing but bytes and token ids."""
    sender, receiver = engine(), engine()
    first = sender.run(prefill(0, [(ANNA, 0, 10)], CLEAR))
    guest = replace(
        ANNA, row=2, working_slot=0, pages={Kind.FULL: (0, 1, 2), Kind.WINDOW: (5, 6, 7)}
    )
    moves = [(Kind.RECURRENT, 2, 0)]
    moves += [(k, a, b) for k in PAGES for a, b in zip(PAGES[k], guest.pages[k], strict=False)]
    for kind, src, dst in moves:
        content = bytes(sender.transfer.read(kind, src))
        half = len(content) // 2
        receiver.transfer.write(kind, dst, half, content[half:])
        receiver.transfer.write(kind, dst, 0, content[:half])
        assert receiver.transfer.digest(kind, dst) == sender.transfer.digest(kind, src)
    seeds = (RowSeed(2, as_token_ids([*PROMPT, token(first)])),)
    second = receiver.run(decode(0, [(guest, 10)], SlotOps(seeds=seeds)))
    assert token(second) == fake_tokens(PROMPT, 2, sender.vocab_size)[1]


def test_corrupt_bytes_void_their_request_until_it_starts_anew() -> None:
    fake = engine()
    fake.run(with_snapshots(prefill(0, [(ANNA, 0, 10)], CLEAR), (8, 6)))
    arena = bytearray(64)
    digest = fake.transfer.store_unit(Kind.RECURRENT, 6, memoryview(arena))
    arena[0] ^= 1
    fake.host_tier.attach(memoryview(arena))
    bert = replace(ANNA, request_id="bert", row=1, working_slot=4)
    seeds = (RowSeed(1, as_token_ids(PROMPT[:8])),)
    bad = load(bert, Kind.RECURRENT, 4, 0, bytes(64), digest)
    outcome = fake.run(prefill(1, [(bert, 8, 10)], SlotOps(loads=(bad,), seeds=seeds)))
    assert outcome.corrupt == ("bert",)
    assert outcome.loaded.num_bytes == 0, "what is not verified was not brought"
    # The step that was already in flight computes nothing for it either.
    fake.run(decode(2, [(bert, 10)]))
    anew = replace(bert, pages={Kind.FULL: (8, 9, 10), Kind.WINDOW: (5, 6, 7)})
    outcome = fake.run(prefill(3, [(anew, 0, 10)], SlotOps(clears=(4,))))
    assert (outcome.corrupt, token(outcome)) == ((), fake_tokens(PROMPT, 1, fake.vocab_size)[0])


def test_slot_operations_are_done_once() -> None:
    """Defect 3, without a model."""
    fake = engine()
    step = prefill(0, [(ANNA, 0, 10)], CLEAR)
    fake.run(step)
    with pytest.raises(WrongStamp, match=r"of position 10, not .* of position 0"):
        fake.run(step)
    assert fake.once.num_consumed == 1


def test_logprobs_come_when_asked_for() -> None:
    asking = replace(ANNA, params=SamplingParams(temperature=0.0, logprobs=3))
    sampled = engine().run(prefill(0, [(asking, 0, 10)], CLEAR)).sampled[0]
    assert sampled.token_id in sampled.logprobs
    assert len(sampled.logprobs) == 3
