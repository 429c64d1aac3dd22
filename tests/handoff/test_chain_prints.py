"""Prints of a chain say what two requests share, in few bytes, and survive the way through text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferryman.cache.keys import PageKey, as_token_ids, page_keys
from ferryman.handoff.chain_prints import MAX_PRINTS, chain_prints, decode_prints, encode_prints

lengths = st.integers(0, 700)


def chain(length: int, fork: int) -> tuple[PageKey, ...]:
    """Pages of one token; from page `fork` on it goes a way of its own."""
    tokens = [page if page < fork else 1000 + fork + page for page in range(length)]
    return page_keys(b"root", as_token_ids(tokens), 1)


@given(lengths)
def test_prints_survive_the_round_trip_and_are_few(length: int) -> None:
    prints = chain_prints(chain(length, length))
    assert decode_prints(encode_prints(prints)) == prints
    assert len(prints.prints) <= MAX_PRINTS
    assert prints.step == 1 or len(prints.prints) * 2 >= MAX_PRINTS
    assert len(encode_prints(prints)) <= 520


@given(lengths, lengths, st.integers(0, 700))
def test_what_two_chains_share_is_known_to_the_larger_step(
    first: int, second: int, fork: int
) -> None:
    mine, theirs = chain_prints(chain(first, 700)), chain_prints(chain(second, fork))
    step = max(mine.step, theirs.step)
    assert mine.shared_pages(theirs) == min(first, second, fork) // step * step
    assert theirs.shared_pages(mine) == mine.shared_pages(theirs)


@pytest.mark.parametrize(
    "text", ["", "1", "0:", "3:", "-1:", "x:00000000", "1:0000", "1:zz", "1:" + "00000000" * 65]
)
def test_what_are_no_prints_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no prints"):
        decode_prints(text)
