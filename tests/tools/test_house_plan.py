"""The large packages keep to their plan, and its numbers are counted as it says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePath

import pytest
from tools.house.plan import (
    PACKAGES,
    PlannedPackage,
    arrows_of,
    circles,
    measured,
    missed,
    num_floors,
    num_uphill,
)
from tools.house.source import SOURCES, Module, parsed

from tools import house_plan

TOY = PlannedPackage(PurePath("services/toy"), {"modules": 3, "arrows": 2})


@pytest.fixture(scope="module")
def sources() -> Sequence[Module]:
    return parsed(SOURCES)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: str(package.folder))
def test_a_package_meets_its_targets(package: PlannedPackage, sources: Sequence[Module]) -> None:
    today = measured(package, sources)
    assert today["modules"] > 1, "the folder exists"
    assert not missed(package, today), today


def test_a_sub_package_is_one_member_and_imports_count_anywhere() -> None:
    modules = [
        _module("__init__", "from toy import scheduler"),
        _module("scheduler", "def run():\n    from toy.pages import table\n    import toy.keys"),
        _module("keys", "if TYPE_CHECKING:\n    from toy import pages"),
        _module("pages/__init__", ""),
        _module("pages/table", "from toy.pages.slots import Slot\nfrom toyland.keys import Key"),
        _module("pages/slots", "import os"),
        Module(Path("services/toyland/keys.py"), "toyland.keys", "import toy.keys\n"),
    ]
    arrows = arrows_of(TOY, modules)
    assert arrows == {"scheduler": {"pages", "keys"}, "keys": {"pages"}, "pages": set()}
    today = measured(TOY, modules)
    assert today == {"modules": 3, "floors": 3, "arrows": 3, "uphill": 0}
    assert missed(TOY, today) == {"arrows"}


def test_only_loose_files_are_members_where_sub_packages_have_plans_of_their_own() -> None:
    loose = PlannedPackage(TOY.folder, {"modules": 1}, has_subpackages=False)
    full = [_module(f"pages/m{number}", "") for number in range(17)]
    modules = [_module("__init__", ""), _module("keys", "import toy.pages"), *full]
    assert measured(loose, modules)["modules"] == 1


def test_a_full_sub_package_hides_no_modules() -> None:
    pages = [_module(f"pages/m{number}", "") for number in range(16)]
    assert measured(TOY, [_module("keys", ""), *pages])["modules"] == 2
    pages.append(_module("pages/further", ""))
    assert measured(TOY, [_module("keys", ""), *pages])["modules"] == 2 + 17


def test_a_circle_is_one_floor() -> None:
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set[str](), "e": set[str]()}
    assert num_floors(arrows) == 3
    assert circles(arrows) == [frozenset("bc")]
    assert num_floors({}) == 0


def test_the_fewest_arrows_that_open_all_circles_lead_uphill() -> None:
    assert num_uphill({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == 0
    assert num_uphill({"a": {"b", "c", "d"}, "b": {"c", "d"}, "c": {"d"}, "d": {"a"}}) == 1
    two_circles = {"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"c"}}
    assert num_uphill(two_circles) == 2
    members = "abcdefghijkl"
    assert num_uphill({member: set(members) - {member} for member in members}) == 12 * 11 // 2


def test_the_table_has_a_row_for_each_package(
    sources: Sequence[Module], capsys: pytest.CaptureFixture[str]
) -> None:
    assert house_plan.report(sources) == 0
    table = capsys.readouterr().out
    assert all(f"| `{package.folder}` |" in table for package in PACKAGES)


def test_the_status_is_one_if_a_target_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    folder = "kernels/ferryman_kernels"
    crowded = [
        Module(Path(f"{folder}/op_{number}.py"), f"ferryman_kernels.op_{number}", "")
        for number in range(10)
    ]
    assert house_plan.report(crowded) == 1
    assert "modules" in capsys.readouterr().out


def _module(name: str, text: str) -> Module:
    dotted = f"toy.{name.replace('/', '.')}".removesuffix(".__init__")
    return Module(Path(f"services/toy/{name}.py"), dotted, f"{text}\n")
