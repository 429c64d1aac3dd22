"""The lifecycle log has a prompt's fork points: a simulator keeps state where the worker did."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.harness.pair import pair_of_workers, request

PROMPT = [1 + i % 5 for i in range(50)]


@pytest.mark.parametrize(
    ("points", "facts"),
    [
        pytest.param((16, 32), {"forks": [16, 32]}, id="a conversation"),
        pytest.param((), {}, id="a prompt without places"),
    ],
)
async def test_queued_says_where_other_prompts_are_likely_to_part(
    points: tuple[int, ...], facts: dict[str, list[int]]
) -> None:
    async with pair_of_workers() as pair:
        asked = replace(request("r1", PROMPT), fork_points=points)
        await pair.run_prefill(pair.order(asked))
        (queued,) = pair.prefill.facts("queued")
        assert {name: fact for name, fact in queued.items() if name != "position"} == facts
