"""Plants each defect in turn and reports whether its tests catch it."""

from __future__ import annotations

import queue
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from tools.mutation.mutants import Mutant, why_not_plantable
from tools.mutation.tree_copy import PytestRun, TreeCopy

T = TypeVar("T")
MutantStatus = Literal["caught", "survived", "broken"]


@dataclass(frozen=True, slots=True)
class MutantResult:
    """A mutant's status. `detail`: how its tests failed, or why it could not be tried."""

    mutant: Mutant
    status: MutantStatus
    detail: str
    seconds: float = 0.0


def examine_all(
    mutants: Sequence[Mutant], source: Path, jobs: int, seconds: float
) -> Iterator[MutantResult]:
    """Yields the results in the order of the list; `jobs` run at once, each in its own copy."""
    reasons = {mutant.name: why_not_plantable(mutant, source) for mutant in mutants}
    with ExitStack() as stack:
        copies: queue.SimpleQueue[TreeCopy] = queue.SimpleQueue()
        for _ in range(jobs):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-"))
            copies.put(TreeCopy(source, Path(folder)))
        pool = stack.enter_context(ThreadPoolExecutor(jobs))

        def in_a_copy(work: Callable[[TreeCopy], T]) -> T:
            copy = copies.get()
            try:
                return work(copy)
            finally:
                copies.put(copy)

        tests = sorted({mutant.tests for mutant in mutants if reasons[mutant.name] is None})
        without = in_a_copy(lambda copy: run_without(tests, copy, seconds))

        def examined(mutant: Mutant) -> MutantResult:
            reason = reasons[mutant.name]
            if reason is not None:
                return MutantResult(mutant, "broken", reason)
            return in_a_copy(lambda copy: examine(mutant, copy, without[mutant.tests], seconds))

        yield from pool.map(examined, mutants)


def run_without(
    tests: Sequence[tuple[str, ...]], copy: TreeCopy, seconds: float
) -> dict[tuple[str, ...], PytestRun]:
    """Each set's run without a defect: all sets together, and one by one if that fails."""
    every = sorted({name for names in tests for name in names})
    together = copy.run(every, seconds * len(tests)) if every else None
    if together is not None and together.is_success:
        return dict.fromkeys(tests, together)
    return {names: copy.run(names, seconds) for names in tests}


def examine(mutant: Mutant, copy: TreeCopy, without: PytestRun, seconds: float) -> MutantResult:
    """Plants one defect and runs its tests; `without` is their run without it."""
    if not without.is_success:
        return MutantResult(mutant, "broken", f"fails without the defect: {without.detail}")
    began = time.monotonic()
    with copy.planted(mutant):
        run = copy.run(mutant.tests, seconds)
    took = time.monotonic() - began
    if run.is_success:
        return MutantResult(mutant, "survived", f"these pass: {', '.join(mutant.tests)}", took)
    return MutantResult(mutant, "caught" if run.is_failure else "broken", run.detail, took)


def summary(results: Sequence[MutantResult]) -> str:
    """One line with the share of caught mutants."""
    counts = {s: sum(r.status == s for r in results) for s in ("caught", "survived", "broken")}
    share = counts["caught"] / len(results) if results else 1.0
    return (
        f"caught {counts['caught']} of {len(results)} ({share:.0%});"
        f" {counts['survived']} survived, {counts['broken']} broken"
    )
