"""Known ways to get a hand-off wrong, in the services' own code: rows 8, 9, 33 and 34.

Row 33 is tried on the tables alone in `tests/handoff/test_handoff_defects.py`.
"""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.doubles.stamps import fake_manifest
from tests.harness.pair import StampedPair, unwrapped
from tests.harness.schedule import ALL_KINDS, PAGE, books, is_all_cached, request

from ferryman.cache.manifest import Kind
from ferryman.errors import CorruptState, FerrymanError
from ferryman.handoff.offer import UnitsToSend, offered_ranges
from ferryman.handoff.usage import CachedTokens
from ferryman.handoff.values import Reservation, WantedUnit, num_units, units_of
from ferryman.wire.values import Usage
from ferryman_router.request.attempt_result import settled_usage

# Rows 8 and 9: units are paired by absolute name, and a reservation is a value.

UNITS = st.sets(st.tuples(st.sampled_from([Kind.FULL, Kind.WINDOW]), st.integers(0, 9)), max_size=6)


@given(UNITS, st.integers(0, 40), st.integers(1, 40), st.integers(1, 12))
def test_rows_8_and_9_what_leaves_is_what_was_wanted_once_and_by_name(
    names: set[tuple[Kind, int]], position: int, prompt_len: int, window_len: int
) -> None:
    manifest = fake_manifest(PAGE, kinds=list(Kind), window_len=window_len)
    wanted = tuple(WantedUnit(kind, index, 7) for kind, index in sorted(names))
    reservation = Reservation("res", 9, 1, (*wanted, WantedUnit(Kind.RECURRENT, prompt_len, 7)), 5)
    offered = offered_ranges(manifest, prompt_len)
    for _ in range(2):  # a retry finds the reservation as it was
        if names - set(units_of(offered)):
            with pytest.raises(CorruptState, match="decode wants"):
                UnitsToSend(reservation, offered, PAGE)
            continue
        outgoing = UnitsToSend(reservation, offered, PAGE)
        assert outgoing.num_superfluous == num_units(offered) - len(names) - 1
        early = outgoing.up_to(position)
        assert {unit.name for unit in early} == {
            (kind, index)
            for kind, index in names
            if kind is Kind.FULL and PAGE * index + PAGE <= position
        }
        assert outgoing.up_to(position) == []
        lacking = {unit.name for unit in wanted} - {unit.name for unit in early}
        rest = outgoing.remaining()
        assert {unit.name for unit in rest} == lacking | {(Kind.RECURRENT, prompt_len)}
        assert rest[-1].kind is Kind.RECURRENT, "the state goes last"
        assert outgoing.num_waiting == 0


async def test_row_8_lists_of_different_length_pair_equal_pages(pair: StampedPair) -> None:
    """Prefill has all units; decode wants those beyond its own prefix."""
    await pair.hand_off(request(ALL_KINDS, "r0", [1] * 10, 3))
    await pair.hand_off(request(ALL_KINDS, "r1", [1] * 10 + [2] * 11, 3))
    await pair.hand_off(request(ALL_KINDS, "r2", [1] * 10 + [2] * 11 + [1] * 6, 3))


# Row 33: each side learns of every end on the other side.


# After four steps the prompt is held: then the schedule has done its part.
ENDS = [("caller goes away", n) for n in range(6)] + [("decode gives up", n) for n in range(6)]
ENDS += [("schedule gives up", n) for n in range(4)]


@pytest.mark.parametrize(("end", "steps"), ENDS)
async def test_row_33_an_end_on_one_side_frees_the_other(
    pair: StampedPair, end: str, steps: int
) -> None:
    attempt, side = pair.attempt(request(ALL_KINDS, "r0", [1] * 25, 9))
    running = asyncio.create_task(attempt.run(0))
    side.arrives.clear()
    await pair.settle()
    for _ in range(steps):
        await pair.step()
    if end == "caller goes away":
        running.cancel()
    elif end == "schedule gives up":
        pair.prefill.scheduler.cancel(attempt.name, pair.now)
    else:
        pair.receiver.carry_out(pair.receiver.table.abort("r0", 1, pair.now).effects)
    side.arrives.set()
    for _ in range(8):
        await pair.step()
    assert running.done()
    with pytest.raises((asyncio.CancelledError, FerrymanError)):
        await unwrapped(running)
    assert len(side.aborts) == 1, "decode hears of it"
    assert is_all_cached(pair.prefill)
    assert books(pair.decode) == {}


# Row 34: cached tokens are counted once.


async def test_row_34_cached_tokens_stay_within_the_prompt_when_both_sides_have_it(
    pair: StampedPair,
) -> None:
    for index, prompt in enumerate([[1] * 17, [1] * 17, [1] * 17 + [2] * 9, [1] * 21]):
        usage = await pair.hand_off(request(ALL_KINDS, f"r{index}", prompt, 2))
        assert usage.prompt_tokens == len(prompt)
        assert usage.cached.total < len(prompt), "one token at least is computed"
        assert usage.cached.total == (0 if index == 0 else 16)


@given(st.integers(1, 99), st.tuples(*[st.integers(0, 99)] * 4))
def test_row_34_a_count_beyond_the_prompt_is_never_shown(
    prompt_len: int, by_tier: tuple[int, int, int, int]
) -> None:
    """A retry may count tokens of an answer as its prompt; the client's prompt is shorter."""
    counted = Usage(500, cached=CachedTokens(*by_tier))
    shown = settled_usage(counted, None, prompt_len, 3)
    assert shown.prompt_tokens == prompt_len
    assert shown.cached.total == min(prompt_len, sum(by_tier))
