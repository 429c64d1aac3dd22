"""Prints how large the large packages are, beside their targets; exit status 1 if one is missed.

    python tools/house_plan.py

Modules are the members of a package: its own modules, and each sub-package as one. The modules of a
sub-package that has more than 16 are counted too. Floors are members above each other; an arrow is
a member that imports another. Arrows uphill are the fewest that would have to go until no circle of
imports is left.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a plain script

from tools.house.plan import PACKAGES, Measures, arrows_of, circles, measured, missed
from tools.house.source import SOURCES, Module, parsed


def row(cells: Iterable[object]) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


def numbers(measures: Measures, names: Iterable[str]) -> str:
    return " · ".join(str(measures[name]) for name in names)


def report(modules: Sequence[Module]) -> int:
    """Prints the table and the circles, and returns the exit status."""
    is_missed = False
    print(row(["package", "today: modules · floors · arrows · uphill", "target", "missed"]))
    print(row(["---"] * 4))
    for package in PACKAGES:
        today = measured(package, modules)
        names = [name for name in package.targets if name in missed(package, today)]
        is_missed |= bool(names)
        both = (numbers(measures, package.targets) for measures in (today, package.targets))
        print(row([f"`{package.folder}`", *both, ", ".join(names)]))
    for package in PACKAGES:
        for circle in circles(arrows_of(package, modules)):
            print(f"circle in {package.folder}: {', '.join(sorted(circle))}")
    return int(is_missed)


def main() -> int:
    return report(parsed(SOURCES))


if __name__ == "__main__":
    sys.exit(main())
