"""Every fixed number of the product stands in `tests/constants.toml` too."""

from __future__ import annotations

import tomllib

import pytest
from tools.constants import ROOT, as_toml, constants, numbers_in

STATED = tomllib.loads((ROOT / "tests/constants.toml").read_text())
FOUND = constants(ROOT)


def test_the_numbers_of_a_module_are_found() -> None:
    source = """
A_SECONDS, _B = 2.5, 3
C_BYTES: int = 4 << 20
D = C_BYTES // 2 - _B
lower = 5
FLAG = True
NAME = "six"
E = call(7)
"""
    assert numbers_in(source) == {"A_SECONDS": 2.5, "_B": 3, "C_BYTES": 4 << 20, "D": 2097149}


def test_the_table_s_text_has_every_number() -> None:
    tables: dict[str, dict[str, int | float]] = {
        "a.py": {"X": 1e-6, "Y": -3},
        "b/c.py": {"Z": 5 << 30},
    }
    assert tomllib.loads(as_toml(tables)) == tables


@pytest.mark.parametrize("name", sorted(STATED | FOUND))
def test_a_fixed_number_is_what_the_table_says(name: str) -> None:
    """Change it in both places, if the change is meant."""
    assert FOUND.get(name, {}) == STATED.get(name, {}), f"{name}, or tests/constants.toml"
