"""Cached tokens are counted once, whoever had them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ferryman.handoff.usage import CachedTokens, count_once


@given(st.integers(1, 500), st.data(), st.integers(0, 600))
def test_cached_tokens_never_exceed_the_prompt(
    prompt_len: int, data: st.DataObject, decode_len: int
) -> None:
    device = data.draw(st.integers(0, prompt_len))
    host = data.draw(st.integers(0, prompt_len - device))
    storage = data.draw(st.integers(0, prompt_len - device - host))
    prefill = CachedTokens(device, host, storage)
    counted = count_once(prompt_len, prefill, decode_len)
    assert counted.total == max(prefill.total, min(decode_len, prompt_len))
    assert (counted.host, counted.storage) == (host, storage)


def test_a_prefix_that_both_workers_hold_counts_once() -> None:
    assert count_once(100, CachedTokens(64, 16), 64) == CachedTokens(64, 16)
    assert count_once(100, CachedTokens(64), 96) == CachedTokens(96)
