"""Frameworks of PyPI, each in an environment of its own: they disagree about what they need."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PypiFolder:
    """A folder with an environment for each package that was installed. Raises CalledProcessError
    if pip cannot install one."""

    folder: Path

    def path(self, package: str) -> str:
        """The folder of the commands of a package's environment."""
        return str(self.folder / package / "bin")

    def install(self, package: str, *others: str) -> None:
        """Makes the environment of a package, which has the newest versions that go together."""
        place = self.folder / package
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        command = [str(place / "bin" / "pip"), "install", "--quiet", "--upgrade"]
        subprocess.run([*command, package, *others], check=True)

    def version(self, package: str) -> str:
        """The version of an installed package."""
        program = f"import importlib.metadata as m; print(m.version({package!r}))"
        command = [str(self.folder / package / "bin" / "python"), "-c", program]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
