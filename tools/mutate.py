"""Plants known defects in a copy of this tree and says which of them the tests catch.

    python tools/mutate.py                 all areas
    python tools/mutate.py wire answers    two areas
    python tools/mutate.py --list          names only, nothing runs

    python tools/mutate.py --drawn 40 --seed 1 router     40 that nobody chose, of one area

A defect ("mutant") is an entry of `tools/mutants/<area>.toml`:

    [[mutant]]
    name = "the digest of the last wanted unit is not compared"
    file = "shared/ferryman/handoff/commit_check.py"
    old = "text that occurs exactly once in the file"
    new = "the defective text"
    tests = ["tests/handoff/test_x.py::test_y"]

Its tests pass without the defect, and with it at least one fails. A mutant whose text does not
compile, whose tests cannot be collected or do not end in time proves nothing: it is "broken". The
exit status is 1 unless all are caught. Random tests run with one seed, so figures repeat.

With --drawn a seed chooses the defects (`tools/mutation/generator.py`). The tests that reach their
lines must notice: the quickest, as many as need `--budget` seconds together.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it runs as a plain script

from tools.mutation import drawn  # noqa: E402
from tools.mutation.areas import AREAS  # noqa: E402
from tools.mutation.drawn import DrawnDefect  # noqa: E402
from tools.mutation.examination import MutantResult, examine_all, summary  # noqa: E402
from tools.mutation.judgements import (  # noqa: E402
    Judgement,
    read_equivalents,
    read_judgements,
    table,
)
from tools.mutation.mutants import read_areas  # noqa: E402
from tools.mutation.reach import reach_of  # noqa: E402


def parser() -> argparse.ArgumentParser:
    """The command line."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    words.add_argument("areas", nargs="*", help="names of lists, without .toml; all when absent")
    words.add_argument("--only", default="", help="those whose name contains this")
    words.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    words.add_argument("--jobs", type=int, default=1, help="how many run at once (1)")
    words.add_argument("--seconds", type=float, default=180.0, help="limit of a test run (180)")
    words.add_argument(
        "--drawn", type=int, default=0, help="draw so many; areas: " + ", ".join(AREAS)
    )
    words.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    words.add_argument("--budget", type=float, default=20.0, help="seconds of tests a draw (20)")
    words.add_argument("--out", type=Path, help="append to this; those that are in it are done")
    words.add_argument("--again", type=Path, help="only what survived in this, appended to it")
    words.add_argument("--notes-anew", action="store_true", help="run rooms again to note reach")
    words.add_argument("--root", type=Path, default=ROOT, help="the tree (this one)")
    return words


def show(result: MutantResult) -> None:
    mutant = result.mutant
    print(f"{result.status:8}  {mutant.area:10}  {mutant.name}  ({result.seconds:.1f} s)")
    if result.status != "caught":
        print(f"          {mutant.file}: {result.detail}")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each mutant and the share caught; returns 0 if all are caught."""
    options = parser().parse_args(arguments)
    if options.drawn:
        return main_of_drawn(options)
    try:
        listed = read_areas(options.root / "tools" / "mutants", options.areas)
    except ValueError as error:
        parser().error(str(error))
    mutants = [mutant for mutant in listed if options.only in mutant.name]
    if options.list:
        for mutant in mutants:
            print(f"{mutant.area:10}  {mutant.name}  ({mutant.file})")
        return 0
    results = []
    for result in examine_all(mutants, options.root, max(1, options.jobs), options.seconds):
        show(result)
        results.append(result)
    print(summary(results))
    return int(any(result.status != "caught" for result in results))


def main_of_drawn(options: argparse.Namespace) -> int:
    """Draws, prints a line for each defect and the table of areas and kinds."""
    areas = options.areas or list(AREAS)
    if unknown := set(areas) - AREAS.keys():
        parser().error(f"no such area: {', '.join(sorted(unknown))}")
    rooms = dict.fromkeys(room for area in areas for room in AREAS[area].rooms)
    notes = {room: reach_of(room, options.root, options.notes_anew, 2) for room in rooms}
    defects = drawn.draw(areas, options.drawn, options.seed, options.root, notes, options.budget)
    out = options.again or options.out
    known = known_judgements(defects, out)
    due = due_defects(defects, known, bool(options.again), options.only)
    if options.list:
        for defect in due:
            print(f"{defect.area:10}  {defect.name}  ({len(defect.tests)} tests)")
        return 0
    os.nice(max(0, 19 - os.nice(0)))
    for judgement in drawn.examine_drawn(due, options.root, options.jobs, options.seconds):
        known[judgement.area, judgement.name] = judgement
        if out:
            judgement.written_to(out)
        place = f"{judgement.name}  (line {judgement.line})"
        print(f"{judgement.status:8}  {judgement.area:10}  {place}  ({judgement.seconds:.1f} s)")
        print(f"          {judgement.detail}", flush=True)
    judgements = [known[d.area, d.name] for d in defects if (d.area, d.name) in known]
    print(table(judgements))
    return int(any(j.status in ("survived", "broken") for j in judgements))


Known = dict[tuple[str, str], Judgement]


def known_judgements(defects: Sequence[DrawnDefect], out: Path | None) -> Known:
    """Those of the file `out`, and of the list of edits that change nothing."""
    reasons = read_equivalents()
    listed = [d.judged("equivalent", reasons[d.name]) for d in defects if d.name in reasons]
    return (read_judgements(out) if out else {}) | {(j.area, j.name): j for j in listed}


def due_defects(
    defects: Sequence[DrawnDefect], known: Known, is_again: bool, only: str
) -> list[DrawnDefect]:
    """Those that are to be tried: nobody has yet, or `is_again` and they were not caught."""
    status = {key: judgement.status for key, judgement in known.items()}
    wanted = ("survived", "broken") if is_again else (None,)
    return [d for d in defects if only in d.name and status.get((d.area, d.name)) in wanted]


if __name__ == "__main__":
    sys.exit(main())
