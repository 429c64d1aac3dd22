"""Bounds and calls of the wire and the hand-off's values that a draw of planted defects changed
while no test noticed."""

from __future__ import annotations

import logging
from typing import Any, cast

import numpy as np
import pytest

from ferryman.errors import InvalidRequest
from ferryman.handoff.usage import CachedTokens
from ferryman.wire.codec.request import _check_tokens
from ferryman.wire.nats.permissions import MAX_SHOWN, BrokerRefusals

TOKENS = np.arange(3, dtype=np.int32)


def test_the_first_tokens_that_were_cached_are_those_of_the_nearest_tiers() -> None:
    cached = CachedTokens(device=10, host=20, storage=30, peer=40)
    assert cached.at_most(100) == cached
    assert cached.at_most(25) == CachedTokens(device=10, host=15)
    assert cached.at_most(61) == CachedTokens(device=10, host=20, storage=30, peer=1)
    assert cached.at_most(0) == CachedTokens()


def test_a_prompt_has_a_token_that_was_not_generated() -> None:
    _check_tokens(cast(Any, TOKENS), 2)
    for num_generated in (3, 4):
        with pytest.raises(InvalidRequest, match="comes before"):
            _check_tokens(cast(Any, TOKENS), num_generated)
    with pytest.raises(InvalidRequest, match="empty"):
        _check_tokens(cast(Any, TOKENS[:0]), 0)


def test_each_refusal_is_counted_and_so_many_kinds_are_shown_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusals = BrokerRefusals()
    caplog.set_level(logging.WARNING)
    for number in range(MAX_SHOWN + 3):
        for _ in range(2):
            assert refusals.take(RuntimeError(f"Permissions Violation for subject {number}"))
    assert not refusals.take(RuntimeError("slow consumer"))
    assert refusals.number == 2 * (MAX_SHOWN + 3)
    assert len(caplog.records) == MAX_SHOWN
