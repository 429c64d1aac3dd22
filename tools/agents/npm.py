"""Packages of npm: agents, and the Node that they need."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

_NODE = "node"


@dataclass(frozen=True, slots=True)
class NpmFolder:
    """A folder with packages of npm. Raises CalledProcessError if npm cannot install one."""

    folder: Path

    @property
    def path(self) -> str:
        """The folders of commands, the newest Node first."""
        return f"{self.modules / _NODE / 'bin'}:{self.modules / '.bin'}"

    @property
    def modules(self) -> Path:
        """All packages."""
        return self.folder / "node_modules"

    def version(self, package: str) -> str:
        """The version of an installed package."""
        return str(json.loads((self.modules / package / "package.json").read_text())["version"])

    def prepare(self) -> None:
        """Installs Node. It comes first: npm takes an older agent where the Node at hand is too old
        for the newest."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._npm_install(_NODE)

    def install(self, *packages: str) -> None:
        """Installs packages in their newest versions."""
        self._npm_install(*(f"{package}@latest" for package in packages))

    def _npm_install(self, *packages: str) -> None:
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(self.folder)]
        path = f"{self.path}:{os.environ['PATH']}"
        subprocess.run([*command, *packages], check=True, env={**os.environ, "PATH": path})
