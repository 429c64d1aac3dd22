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
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it runs as a plain script

from tools.mutation import drawn  # noqa: E402
from tools.mutation.areas import AREAS  # noqa: E402
from tools.mutation.examination import MutantResult, examine_all, summary  # noqa: E402
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
    words.add_argument("--again", type=Path, help="only those that survived in this output")
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
    again = options.again.read_text() if options.again else None
    defects = [
        defect
        for defect in defects
        if options.only in defect.edit.name
        and (again is None or f"survived  {defect.area:10}  {defect.edit.name}" in again)
    ]
    if options.list:
        for defect in defects:
            print(f"{defect.area:10}  {defect.edit.name}  ({len(defect.tests)} tests)")
        return 0
    results = []
    for result in drawn.examine_drawn(defects, options.root, options.jobs, options.seconds):
        place = f"{result.defect.edit.name}  (line {result.defect.edit.first})"
        print(f"{result.status:8}  {result.defect.area:10}  {place}  ({result.seconds:.1f} s)")
        print(f"          {' '.join(result.detail.split())}", flush=True)
        results.append(result)
    print(drawn.table(results))
    return int(any(result.status != "caught" for result in results))


if __name__ == "__main__":
    sys.exit(main())
