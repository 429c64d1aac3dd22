"""The files of a model as a cluster found them at its start, to notice that they change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

READ = (".safetensors", ".json", ".jinja", ".gguf")


def stamps_of(model: Path) -> dict[str, str]:
    """The size and the time of the last change of each file that a worker or a router reads."""
    files = sorted(model.iterdir()) if model.is_dir() else [model]
    return {path.name: _stamp(path) for path in files if path.suffix in READ and path.is_file()}


def changed_files(model: Path, stamps: Mapping[str, str]) -> list[str]:
    """The names of files that are gone, new, or have another stamp now."""
    try:
        now = stamps_of(model)
    except OSError:
        now = {}
    return sorted(name for name in {*now, *stamps} if now.get(name) != stamps.get(name))


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"
