"""The plan of the large packages: how many members each has, and how these import each other.

The members of a package are the modules directly in it and its sub-packages. A member stands above
all others that it imports, anywhere: inside functions and for types too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from pathlib import PurePath

from tools.house.modules import full_folders, imported
from tools.house.source import Module

Arrows = Mapping[str, Set[str]]
Measures = Mapping[str, int]

# Orders of members that are compared at once: enough for the best order of a circle of twelve.
ORDERS_KEPT = 1000


@dataclass(frozen=True, slots=True)
class PlannedPackage:
    """A package, and the upper bounds of its measures."""

    folder: PurePath
    targets: Measures
    has_subpackages: bool = True
    """Whether sub-packages are members. Those of `ferryman` have plans of their own."""

    @property
    def name(self) -> str:
        return ".".join(self.folder.parts[1:])


def _targets(*, modules: int, floors: int, arrows: int, uphill: int) -> Measures:
    return {"modules": modules, "floors": floors, "arrows": arrows, "uphill": uphill}


PACKAGES = (
    PlannedPackage(
        PurePath("kernels/ferryman_kernels"), _targets(modules=9, floors=3, arrows=16, uphill=0)
    ),
    PlannedPackage(
        PurePath("shared/ferryman/model"), _targets(modules=14, floors=10, arrows=52, uphill=0)
    ),
    PlannedPackage(
        PurePath("services/ferryman_router"), _targets(modules=11, floors=7, arrows=29, uphill=0)
    ),
    PlannedPackage(
        PurePath("shared/ferryman/wire"), _targets(modules=10, floors=5, arrows=16, uphill=0)
    ),
    PlannedPackage(PurePath("shared/ferryman"), {"modules": 5}, has_subpackages=False),
)


def arrows_of(package: PlannedPackage, modules: Iterable[Module]) -> Arrows:
    """Each member of a package, and the other members that it imports."""
    every = list(modules)
    members = {module.name: member for module in every if (member := _member(package, module))}
    arrows: dict[str, set[str]] = {member: set() for member in members.values()}
    for module in every:
        if member := members.get(module.name):
            others = {members[name] for name in imported(module.nodes) if name in members}
            arrows[member] |= others - {member}
    return arrows


def _member(package: PlannedPackage, module: Module) -> str | None:
    """The member that a module belongs to; None outside the package and for its `__init__`."""
    inside = module.name.removeprefix(f"{package.name}.")
    is_inside = inside != module.name
    is_direct = module.path.parent == package.folder
    if not is_inside or not (is_direct or package.has_subpackages):
        return None
    return inside.partition(".")[0]


def measured(package: PlannedPackage, modules: Iterable[Module]) -> Measures:
    """The numbers that targets bound, as they are today."""
    every = list(modules)
    arrows = arrows_of(package, every)
    # A sub-package that nobody keeps in mind as a whole hides no modules.
    crowds = [
        count
        for folder, count in full_folders(every).items()
        if package.folder in PurePath(folder).parents and package.has_subpackages
    ]
    return {
        "modules": len(arrows) + sum(crowds),
        "floors": num_floors(arrows),
        "arrows": sum(map(len, arrows.values())),
        "uphill": num_uphill(arrows),
    }


def missed(package: PlannedPackage, today: Measures) -> set[str]:
    """The measures that are above their targets."""
    return {name for name, bound in package.targets.items() if today[name] > bound}


def num_floors(arrows: Arrows) -> int:
    """Members above each other on the longest way down; a circle of members is one floor."""
    below = {member: _reach(arrows, member) for member in arrows}

    @cache
    def floor(member: str) -> int:
        return 1 + max(
            (floor(other) for other in below[member] if member not in below[other]), default=0
        )

    return max(map(floor, arrows), default=0)


def circles(arrows: Arrows) -> Sequence[frozenset[str]]:
    """Members that import each other, directly or through others."""
    below = {member: _reach(arrows, member) for member in arrows}
    sets = {
        frozenset(other for other in below[member] if member in below[other])
        for member in arrows
        if member in below[member]
    }
    return sorted(sets, key=sorted)


def _reach(arrows: Arrows, start: str) -> Set[str]:
    """All members below one; it is among them if it is in a circle."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        further = arrows[waiting.pop()] - reached
        reached |= further
        waiting += further
    return reached


def num_uphill(arrows: Arrows) -> int:
    """The fewest arrows whose removal leaves no circle: those that lead up in the best order.

    Exact for circles of up to twelve members, an upper bound for larger ones.
    """
    return sum(_num_uphill_in(circle, arrows) for circle in circles(arrows))


def _num_uphill_in(circle: frozenset[str], arrows: Arrows) -> int:
    # Members are placed from below. Of all orders of the same members only the best one goes on.
    costs = {frozenset[str](): 0}
    for _ in circle:
        grown: dict[frozenset[str], int] = {}
        for placed, cost in costs.items():
            for member in sorted(circle - placed):
                uphill = cost + len(arrows[member] & (circle - placed))
                order = placed | {member}
                grown[order] = min(uphill, grown.get(order, uphill))
        costs = dict(sorted(grown.items(), key=itemgetter(1))[:ORDERS_KEPT])
    return costs[circle]
