"""Runs of an examination in this process."""

from __future__ import annotations

import asyncio
from random import Random

from ferryman_bench.endpoint.client import AskedEngine
from ferryman_bench.verify.cold_source import ColdSource, FlushedSource, SaltedSource
from ferryman_bench.verify.examination import (
    Examination,
    ExaminationPlan,
    ExaminationReport,
)
from ferryman_bench.verify.ways import Material

MAX_TOKENS = 12
FILLERS = 8


class FirstAccusation(Exception):
    """A way is accused: no need to go on."""


def material_of(seed: int) -> Material:
    return Material(Random(seed), MAX_TOKENS, FILLERS)


def examined(
    asker: AskedEngine,
    *,
    seed: int = 1,
    max_requests: int = 2_000,
    is_flushed: bool = False,
    plan: ExaminationPlan | None = None,
) -> ExaminationReport:
    """The report after `max_requests`, or as soon as a way is accused."""
    material = material_of(seed)
    cold: ColdSource = FlushedSource(material) if is_flushed else SaltedSource(material.random)
    plan = plan or ExaminationPlan(max_requests=max_requests)
    examination = Examination(asker, material, cold, plan=plan)

    def stop_at_an_accusation(num_requests: int) -> None:
        assert num_requests <= max_requests
        if examination.report().accused:
            raise FirstAccusation

    try:
        return asyncio.run(examination.run(stop_at_an_accusation))
    except FirstAccusation:
        return examination.report()
