"""A run of CI says what it could not try."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from tools.not_tried import EXTRAS, MachineFeatures, lines

ROOT = Path(__file__).resolve().parents[2]


def test_a_machine_with_everything_tries_everything() -> None:
    assert list(lines(MachineFeatures(has_tiles=True, has_vectors=True, has_card=True))) == []


def test_each_thing_that_lacks_has_a_line_of_its_own() -> None:
    bare = MachineFeatures(
        has_tiles=False, has_vectors=False, has_card=False, missing_packages=tuple(EXTRAS)
    )
    said = list(lines(bare))
    assert len(said) == 3 + len(EXTRAS)
    for word in ("AMX", "AVX-512", "CUDA", "LiteLLM", "NIXL"):
        assert sum(word in line for line in said) == 1, word


def test_the_extras_that_are_named_have_those_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for package, line in EXTRAS.items():
        (extra,) = re.findall(r"ferryman\[(\w+)\]", line)
        assert any(wanted.startswith(package) for wanted in extras[extra]), package


def test_ci_prints_the_lines() -> None:
    assert "make not-tried" in (ROOT / ".ci/run").read_text()
    assert "-m tools.not_tried" in (ROOT / "Makefile").read_text()
