"""Takes away what an image does not need: `python tools/leave_out.py tools/left_out.toml`.

Runs by the Python whose packages it is about, once all are installed. The list says what and why.
A name or pattern that fits nothing is printed: another release of a package has moved it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LeftOut:
    """One entry of the list."""

    why: str
    distributions: tuple[str, ...]
    paths: tuple[str, ...]
    kept: tuple[str, ...]


def read_list(path: Path) -> Sequence[LeftOut]:
    """The entries of a list. Raises ValueError for one without a reason or with unknown fields."""
    return [_entry(each) for each in tomllib.loads(path.read_text())["left_out"]]


def _entry(given: dict[str, str | list[str]]) -> LeftOut:
    unknown = given.keys() - {"why", "distributions", "paths", "kept"}
    if unknown or not given.get("why"):
        raise ValueError(f"an entry needs `why`, and knows no {sorted(unknown)}: {given}")
    lists = (tuple(given.get(name, ())) for name in ("distributions", "paths", "kept"))
    return LeftOut(str(given["why"]), *lists)


def found(entry: LeftOut, folder: Path, pattern: str) -> Sequence[Path]:
    """The paths that a pattern of an entry fits below the folder, without those that it keeps."""
    kept = {folder / name for name in entry.kept}
    return [path for path in sorted(folder.glob(pattern)) if path not in kept]


def installed(entry: LeftOut, folder: Path) -> Sequence[str]:
    """Those of the entry's distributions that are installed in the folder."""
    names = {
        each.metadata["Name"].lower().replace("_", "-")
        for each in distributions(path=[str(folder)])
    }
    return [name for name in entry.distributions if name in names]


def take_away(entry: LeftOut, folder: Path) -> Sequence[str]:
    """Removes what the entry's patterns fit; returns the patterns that fit nothing."""
    idle = []
    for pattern in entry.paths:
        paths = found(entry, folder, pattern)
        if not paths:
            idle.append(pattern)
        for path in paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)  # it may have gone with a folder around it
    return idle


def uninstall(names: Sequence[str]) -> None:
    """Removes distributions with their commands, by pip, itself in the end."""
    words = ["-m", "pip", "uninstall", "--yes", "--quiet", "--root-user-action=ignore", *names]
    subprocess.run([sys.executable, *words], check=True)


def main(path: str) -> None:
    folder = Path(sysconfig.get_path("purelib"))
    entries = read_list(Path(path))
    names = [name for each in entries for name in installed(each, folder)]
    wanted = [name for each in entries for name in each.distributions]
    idle = [name for name in wanted if name not in names]
    uninstall(names)
    for entry in entries:
        idle += take_away(entry, folder)
    for name in idle:
        sys.stdout.write(f"nothing to leave out by the name {name}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
