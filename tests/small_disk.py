"""A small filesystem of its own, which a test can fill."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, kibibytes: int) -> Iterator[Path]:
    """Mounts it at `folder`, which is made. Skips the test without the right to mount."""
    folder.mkdir()
    options = f"size={kibibytes}k,mode=700"
    mount = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    if os.geteuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("needs the right to mount a small filesystem")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill_disk(folder: Path) -> Path:
    """Fills the filesystem of the folder to its last byte; returns the file to remove for room."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:  # it has no room for so many
                pass
    return filler
