"""The sdist of this tree, the wheel that is built of it, and environments that have only that."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILDERS = ("hatchling", "grpcio-tools>=1.85")  # as pyproject.toml has them
PIP_OPTIONS = ("--quiet", "--disable-pip-version-check", "--no-input", "--ignore-installed")


@dataclass(frozen=True, slots=True)
class EmptyEnvironment:
    """A virtual environment of its own. It finds packages of `beside` after its own ones: none of
    them is ours, for files that lead to a checkout are not followed from there."""

    folder: Path

    @classmethod
    def made(cls, folder: Path, beside: Iterable[Path] = ()) -> EmptyEnvironment:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        (site,) = folder.glob("lib/python3*/site-packages")
        (site / "beside.pth").write_text("".join(f"{path}\n" for path in beside))
        return cls(folder)

    def variables(self, home: Path) -> dict[str, str]:
        """Of a user who has nothing else: no checkout is on any path."""
        path = f"{self.folder / 'bin'}:/usr/local/bin:/usr/bin:/bin"
        return {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8"}

    def install(self, *what: str) -> None:
        """By pip, which finds its index as the caller's does."""
        kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        self.run("-m", "pip", "install", *PIP_OPTIONS, *what, variables=kept)

    def run(
        self, *arguments: str, cwd: Path | None = None, variables: dict[str, str] | None = None
    ) -> str:
        """The output of Python with these arguments. Fails with all that it wrote."""
        command = [str(self.folder / "bin" / "python"), *arguments]
        done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout


def committed_tree(folder: Path) -> Path:
    """A copy of the files of this tree that git knows, as a fresh clone has them."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def built(builder: EmptyEnvironment, tree: Path, kind: str, out: Path) -> Path:
    """The one file of this kind that hatch builds of a tree."""
    builder.run("-m", "hatchling", "build", "-t", kind, "-d", str(out), cwd=tree)
    (path,) = (path for path in out.iterdir() if path.suffix in (".whl", ".gz"))
    return path


def unpacked(sdist: Path, folder: Path) -> Path:
    """The tree in an sdist."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    return tree


def folders_of_dependencies() -> Sequence[Path]:
    """Where this interpreter has what pip installs: torch is too large to install twice."""
    return [Path(path) for path in sys.path if path.endswith("site-packages")]
