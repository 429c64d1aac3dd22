"""docs/journeys.md follows a token and a request from function to function: each exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (ROOT / "shared" / "ferryman", ROOT / "services")
HOP = re.compile(r"`([\w/]+\.py):([\w.]+)`")
PICTURE = re.compile(r"^```\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"\w+(?:/\w+)+\.py")
PAGE = (ROOT / "docs" / "journeys.md").read_text()


def test_every_hop_is_a_function() -> None:
    hops = HOP.findall(PAGE)
    assert len(hops) > 100, "the pattern finds the hops"
    lost = [f"{file}:{name}" for file, name in hops if name not in _functions(file)]
    assert lost == []


def test_every_file_in_a_picture_exists() -> None:
    files = [file for picture in PICTURE.findall(PAGE) for file in FILE.findall(picture)]
    assert len(files) > 20, "the pattern finds the files"
    assert [file for file in files if not any((room / file).is_file() for room in ROOMS)] == []


@cache
def _functions(file: str) -> frozenset[str]:
    """Functions of a file, methods as `Class.method`, and names that a statement assigns."""
    paths = [room / file for room in ROOMS if (room / file).exists()]
    return frozenset(name for path in paths for name in _defined(ast.parse(path.read_text()).body))


def _defined(body: list[ast.stmt], within: str = "") -> list[str]:
    found = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(within + node.name)
        elif isinstance(node, ast.ClassDef):
            found += _defined(node.body, f"{node.name}.")
        elif isinstance(node, ast.Assign):
            found += [name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)]
    return found
