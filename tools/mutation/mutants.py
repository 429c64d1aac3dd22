"""Lists of defects to plant, read from `tools/mutants/<area>.toml`."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

KEYS = {"name", "file", "old", "new", "tests"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One defect and the tests that must catch it. `file` is relative to the tree's root."""

    area: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted_in(self, text: str) -> str:
        return text.replace(self.old, self.new)


def read_areas(folder: Path, names: Sequence[str] = ()) -> list[Mutant]:
    """All mutants of the named areas, or of all. Raises ValueError that names a wrong entry."""
    paths = sorted(folder.glob("*.toml"))
    if unknown := set(names) - {path.stem for path in paths}:
        raise ValueError(f"no such area: {', '.join(sorted(unknown))}")
    mutants = [m for path in paths if not names or path.stem in names for m in _read_area(path)]
    for name, count in Counter(mutant.name for mutant in mutants).items():
        if count > 1:
            raise ValueError(f"{count} mutants are named {name!r}")
    return mutants


def _read_area(path: Path) -> Iterator[Mutant]:
    for entry in tomllib.loads(path.read_text()).get("mutant", []):
        if entry.keys() != KEYS or not entry["tests"]:
            raise ValueError(f"{path.name}: {entry.get('name', entry)!r} is no whole entry")
        yield Mutant(path.stem, **{**entry, "tests": tuple(entry["tests"])})


def why_not_plantable(mutant: Mutant, root: Path) -> str | None:
    """The fault of an entry that cannot be planted, or None. Nothing is run for such an entry."""
    path = root / mutant.file
    if not path.is_file():
        return f"there is no file {mutant.file}"
    text = path.read_text()
    if (count := text.count(mutant.old)) != 1:
        return f"the old text occurs {count} times in {mutant.file}"
    if mutant.old == mutant.new:
        return "the old and the new text are the same"
    if path.suffix == ".py":
        try:
            ast.parse(mutant.planted_in(text))
        except SyntaxError as error:
            return f"the planted text does not compile: {error}"
    return None
