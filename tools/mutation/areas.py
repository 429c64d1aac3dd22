"""Areas of the tree for drawn defects: their files, and the rooms of tests that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Area:
    """Files below `folders`, and rooms: folders of `tests`."""

    folders: tuple[str, ...]
    rooms: tuple[str, ...]


AREAS: Mapping[str, Area] = {
    "router": Area(("services/ferryman_router",), ("router",)),
    "decode": Area(
        ("services/ferryman_decode", "services/ferryman_both"), ("decode", "both", "prefill")
    ),
    "prefill": Area(
        ("services/ferryman_prefill", "shared/ferryman/worker"),
        ("prefill", "both", "decode", "worker", "hostcache"),
    ),
    "hostcache": Area(
        ("services/ferryman_hostcache", "shared/ferryman/tiers", "shared/ferryman/wire/hostcache"),
        ("hostcache", "tiers"),
    ),
    "launcher": Area(("services/ferryman_launcher", "services/ferryman_cli"), ("cli",)),
    "schedule": Area(("shared/ferryman/cache", "shared/ferryman/schedule"), ("cache", "schedule")),
    "wire": Area(
        (
            "shared/ferryman/handoff",
            "shared/ferryman/wire/codec",
            "shared/ferryman/wire/grpc",
            "shared/ferryman/wire/handoff",
            "shared/ferryman/wire/nats",
            "shared/ferryman/wire/redis",
        ),
        ("handoff", "wire", "decode"),
    ),
    "engine": Area(("shared/ferryman/engine",), ("engine",)),
}


def sources_of(area: Area, root: Path) -> dict[str, bytes]:
    """The area's files, by their paths in the tree."""
    paths = {path for folder in area.folders for path in (root / folder).rglob("*.py")}
    named = {str(path.relative_to(root)): path for path in paths}
    return {name: named[name].read_bytes() for name in sorted(named)}
