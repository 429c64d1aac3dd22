"""Launches of one decode step of published models, counted on a card that is not there."""

from __future__ import annotations

import pytest
from tools.decode_launches import step_launches

LAUNCHES = {
    "Granite 4 H micro": (406, 1, 4),
    "Qwen3-Next 80B-A3B": (977, 1, 4),
    "gpt-oss 20b": (341, 1, 4),
}
"""The forward, the likeliest token, a drawn token with all filters."""


@pytest.mark.parametrize("model", LAUNCHES)
def test_a_step_launches_no_more_than_it_did(model: str) -> None:
    launches = step_launches(model)
    parts = launches.forward, launches.greedy, launches.drawn
    assert tuple(part.total() for part in parts) == LAUNCHES[model], parts
