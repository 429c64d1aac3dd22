"""10,000 random schedules on tiny pools, or as many as there is time for: `tests/harness/schedule`.

Windows of one to three pages, two to six snapshots, every combination of kinds. An admitted request
never lacks a slot, an idle worker always admits the head of its queue, no slot is freed twice, and
every read finds the stamp of the state that it needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from tests.harness.schedule import ScheduleKind, play_many

SCHEDULES = int(os.environ.get("FERRYMAN_TEST_SCHEDULES", "200"))
PARTS = 4

HAPPENED = (
    "admitted",
    "answered",
    "buried",
    "cancelled",
    "copied",
    "corrupt",
    "corrupt at decode",
    "declined",
    "drafts accepted",
    "drafts rejected",
    "given up",
    "handed over",
    "hit",
    "loaded at decode full",
    "loaded full",
    "loaded recurrent",
    "loaded window",
    "moved full",
    "moved recurrent",
    "moved window",
    "no room to reserve",
    "refused at the door",
    "resumed",
    "shorter chunks",
    "window lost",
    "windows reused",
)


@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_runs_out_of_slots_stands_still_or_reads_a_wrong_state(
    part: int, record_property: Callable[[str, object], None]
) -> None:
    first, end = (SCHEDULES * number // PARTS for number in (part, part + 1))
    counts = play_many(ScheduleKind(), first, end - first)
    record_property("counts", dict(sorted(counts.items())))
    for what in HAPPENED:
        assert counts[what], f"{what}: it was meant to happen"
