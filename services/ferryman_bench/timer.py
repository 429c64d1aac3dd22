"""Times jobs in turn, so that other load on the machine affects all of them alike."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter, process_time

Job = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one run of a job. `cpu` is the median over all threads of this process.

    `least` is the time on an idle machine, `median` the time on this machine now.
    """

    median: float
    least: float
    cpu: float


def time_in_turn(jobs: Mapping[str, Job], repeats: int) -> dict[str, Timing]:
    """Runs every job once to warm up, then `repeats` rounds of all of them."""
    for job in jobs.values():
        job()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in jobs}
    with _undisturbed():
        for _ in range(repeats):
            for name, job in jobs.items():
                found[name].append(_one(job))
    return {name: _timing(runs) for name, runs in found.items()}


def seconds_of(job: Job, repeats: int) -> Timing:
    """Times one job alone."""
    return time_in_turn({"": job}, repeats)[""]


def _one(job: Job) -> tuple[float, float]:
    cpu, wall = process_time(), perf_counter()
    job()
    return perf_counter() - wall, process_time() - cpu


def _timing(runs: list[tuple[float, float]]) -> Timing:
    walls = [wall for wall, _ in runs]
    return Timing(median(walls), min(walls), median(cpu for _, cpu in runs))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Turns the garbage collector off: a pause would be charged to a job that did not cause it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
