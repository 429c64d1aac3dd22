"""Calls, checks and arguments where a worker's parts meet: each was once left out by a draw of
planted defects, and no test noticed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.cache.manifests import small_manifest
from tests.worker.test_reuse import HYBRID, PAGE, plan_of, unit

from ferryman.cache.manifest import Kind
from ferryman.cache.resume import Reason, Uncached
from ferryman.cache.units import Tier
from ferryman.errors import LeaseLost
from ferryman.handoff.holder import Hold
from ferryman.handoff.usage import CachedTokens
from ferryman.schedule.batch import PrefillStep
from ferryman.worker.handoff_transport import HandoffTransport
from ferryman.worker.loop import StepLoop
from ferryman.worker.send_leases import SendLeases
from ferryman.worker.summary import cached_tokens, kept_tokens
from ferryman_prefill.server import PrefillServicer

FULL = small_manifest(Kind.FULL, page_size=PAGE)


def test_pages_that_came_with_a_state_count_for_its_tier() -> None:
    plan = plan_of(16, 2, unit(Kind.RECURRENT, 3, Tier.STORAGE))
    assert cached_tokens(HYBRID, plan) == CachedTokens(device=8, storage=8)


@pytest.mark.parametrize(
    ("reason", "position", "kept"),
    [
        (Reason.NO_ROOM, 0, 0),
        (Reason.NO_ROOM, 8, 28),
        (Reason.CACHE_OFF, 0, 0),
        (Reason.QUARANTINED, 0, 0),
        (Reason.NEVER_SEEN, 0, 28),
    ],
)
def test_a_prompt_without_room_or_without_a_cache_keeps_nothing(
    reason: Reason, position: int, kept: int
) -> None:
    lacking = (Uncached(reason, position // PAGE, 8),)
    plan = plan_of(position, 0)._replace(uncached=lacking)
    assert kept_tokens(FULL, plan) == kept


def test_a_step_of_prompts_is_told_with_its_tokens_and_its_seconds() -> None:
    told: list[tuple[int, float]] = []
    pace = SimpleNamespace(
        prefilled=lambda *step: told.append(step), loaded=lambda loads: None, costs=lambda: None
    )
    loop = SimpleNamespace(pace=pace, _scheduler=SimpleNamespace(set_costs=lambda costs: None))
    step = PrefillStep.__new__(PrefillStep)
    chunks = (SimpleNamespace(start=4, end=9), SimpleNamespace(start=0, end=2))
    object.__setattr__(step, "chunks", chunks)
    outcome = SimpleNamespace(forward_seconds=0.25, loaded=())
    StepLoop._note_pace(cast(Any, loop), step, cast(Any, outcome))
    assert told == [(7, 0.25)]


async def test_a_send_is_held_to_its_end_and_no_slot_without_a_hold() -> None:
    leases = SendLeases(cast(Any, None), lambda: 0.0)
    with pytest.raises(LeaseLost, match="no longer held"):
        leases.lease("res-1", cast(Any, None))
    leases.begin(Hold("r1", 1, "res-1", 7, 60.0))
    sent = asyncio.get_running_loop().create_future()

    async def sending() -> Any:
        return await sent

    waiting = asyncio.create_task(leases.send("res-1", sending()))
    await asyncio.sleep(0)
    assert len(leases._held["res-1"].sends) == 1
    sent.set_result("sent")
    assert await waiting == "sent"
    assert not leases._held["res-1"].sends


@pytest.mark.parametrize(
    ("apart", "is_apart"), [((), False), (("d2",), False), (("d1",), True), (("d2", "d3"), True)]
)
def test_one_worker_out_of_reach_says_nothing_of_others_and_two_do(
    apart: tuple[str, ...], is_apart: bool
) -> None:
    transport = SimpleNamespace(_clock=lambda: 5.0, _apart=dict.fromkeys((*apart, "was"), 9.0))
    transport._apart["was"] = 5.0  # over
    assert HandoffTransport._is_apart(cast(Any, transport), "d1") == is_apart


def test_an_attempt_that_is_told_to_stop_refuses_its_reservation() -> None:
    refused: list[str] = []
    attempt = SimpleNamespace(refuse=refused.append)
    servicer = cast(Any, SimpleNamespace(_attempts={"r1.2": attempt}))
    for number in (1, 2):
        order = SimpleNamespace(request_id="r1", attempt=number, reservation_id=f"res-{number}")
        PrefillServicer._refuse(servicer, cast(Any, order))
    assert refused == ["res-2"]
