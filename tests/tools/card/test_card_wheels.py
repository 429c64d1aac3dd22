"""The list of wheels for a card's check: all that its parts import, in the versions of CI."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.tags import parse_tag
from packaging.utils import canonicalize_name
from tests.tools.card.reached_imports import ROOT, outside_packages
from tools.card.parts import DRY, ON_CARD, parts_of

ON_IMAGE = {
    "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "numpy", "setuptools",
    "sympy", "torch", "triton", "typing-extensions",
}  # fmt: skip
"""The packages of a bare machine: torch, Triton and numpy, with what these require."""
PROCESSOR_ALONE = {"numba", "llvmlite"}
"""60 MB of loops for processors; without them the references run."""
NOT_ASKED = {"hf-xet", "matplotlib", "opentelemetry-api", "opentelemetry-sdk"}
"""No part comes to them: downloads from a hub, the simulator's pictures, spans for a collector."""
TEST_TOOLS = (
    "transformers", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis",
    "grpcio-tools",
)  # fmt: skip
NEWEST = (2, 31)
"""The glibc of the newest system whose wheels are asked for: Debian 11 has it."""
SERVICES = ("router", "prefill", "decode", "both", "hostcache", "cli")


def listed() -> set[str]:
    lines = (ROOT / "tools/card/wheels.txt").read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def required(roots: Iterable[str]) -> set[str]:
    """These requirements, and what they require, as they are installed here."""
    waiting, names = [Requirement(root) for root in roots], set[str]()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        marker = requirement.marker
        if name in names or (marker is not None and not marker.evaluate({"extra": ""})):
            continue
        names.add(name)
        waiting += map(Requirement, distribution(name).requires or ())
    return names


def modules_of_parts() -> set[str]:
    """The modules that a part's command names, and those of the services that it starts."""
    modules = {f"ferryman_{name}.__main__" for name in SERVICES} | {"tests.conftest", "proto.build"}
    for size, device in ((ON_CARD, "cuda"), (DRY, "cpu")):
        for part in parts_of(size, device, Path("model")):
            modules |= set(_modules(part.command))
    return modules | {"tools.card.check"}


def _modules(command: Iterable[str]) -> Iterable[str]:
    for word in command:
        if re.fullmatch(r"tools(\.\w+)+", word):
            yield word
        elif word.startswith("tests/"):
            path = ROOT / word.partition("::")[0]
            files = [path] if path.is_file() else [*path.glob("test_*.py")]
            for file in (*files, *(path if path.is_dir() else path.parent).glob("conftest.py")):
                yield ".".join(file.relative_to(ROOT).with_suffix("").parts)


@pytest.fixture(scope="module")
def imported() -> Mapping[str, str]:
    return outside_packages(modules_of_parts())


def test_every_import_of_the_parts_is_listed_or_on_the_image(imported: Mapping[str, str]) -> None:
    there = listed() | ON_IMAGE | PROCESSOR_ALONE | NOT_ASKED
    by_import = packages_distributions()
    for package, module in imported.items():
        names = {canonicalize_name(name) for name in by_import[package]}
        assert names & there, f"{module} imports {package}: add {names} to tools/card/wheels.txt"


def test_the_list_is_what_serving_and_its_tests_require_and_no_more() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = required([*project["dependencies"], *TEST_TOOLS])
    assert listed() == names - ON_IMAGE - PROCESSOR_ALONE - NOT_ASKED


def test_every_wheel_has_a_version_and_a_platform_that_is_asked_for() -> None:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(pin.partition("==")[0]) for pin in pins if "==" in pin}
    script = (ROOT / "tools/card/wheels.sh").read_text()
    asked = set(re.findall(r"--platform (\w+)", script))
    for name in listed():
        assert name in pinned, f"{name} has no version in constraints.txt"
        text = distribution(name).read_text("WHEEL") or ""
        tags = [tag for line in re.findall(r"^Tag: (\S+)", text, re.M) for tag in parse_tag(line)]
        platforms = {tag.platform for tag in tags}
        # This machine may have taken a wheel for newer systems, beside which there is an older one.
        if not any(_glibc(platform) > NEWEST for platform in platforms):
            assert platforms & asked, f"{name}: add one of {platforms} to tools/card/wheels.sh"


def _glibc(platform: str) -> tuple[int, ...]:
    version = re.match(r"manylinux_(\d+)_(\d+)_x86_64", platform)
    return tuple(map(int, version.groups())) if version else (0, 0)


def test_imports_within_functions_and_of_services_are_seen(imported: Mapping[str, str]) -> None:
    assert {"uvloop", "grpc_tools", "pytest", "xdist", "llguidance"} <= imported.keys()
