"""A tree that is only on the path runs too, as on a machine with a card and nothing installed."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from ferryman.runtime.version import UNPACKAGED, package_version

SHARED = Path(__file__).parents[2] / "shared"


def test_an_installed_package_has_its_version() -> None:
    assert package_version() == version("ferryman")


def test_a_tree_on_the_path_has_a_version_too() -> None:
    code = "from ferryman.runtime.version import package_version; print(package_version())"
    # Without site packages, among which the installed one is.
    command = [sys.executable, "-S", "-c", f"import sys; sys.path.append({str(SHARED)!r}); {code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/", env={})
    assert done.stdout.strip() == UNPACKAGED
