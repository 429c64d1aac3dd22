"""docs/tour.md opens ten files in order, and docs/architecture.md names every room."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOUR = (ROOT / "docs" / "tour.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
STATION = re.compile(r"^\d+\. \*\*(.+?\?)\*\*\s+\[`(.+?)`\]\(\.\./(.+?)\)\.$", re.MULTILINE)
LARGE_HALLS = (
    "shared/ferryman/model",
    "shared/ferryman/wire",
    "kernels/ferryman_kernels",
    "services/ferryman_router",
)
GENERATED = {"v1"}


def test_the_tour_opens_ten_files_in_order() -> None:
    names = [Path(path).stem for _, _, path in STATION.findall(TOUR)]
    assert names == [
        *("errors", "manifest", "keys", "resume", "batch", "scheduler", "step", "reservation"),
        *("routing_policy", "request_runner"),
    ]


def test_a_file_of_the_tour_is_called_by_the_end_of_its_path() -> None:
    for _, name, path in STATION.findall(TOUR):
        assert path.endswith(name)
        assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("hall", ["shared/ferryman", "services", *LARGE_HALLS])
def test_every_room_is_on_the_plan(hall: str) -> None:
    rooms = {path.parent.name for path in (ROOT / hall).glob("*/__init__.py")} - GENERATED
    assert rooms
    assert {room for room in rooms if f"`{room}`" not in ARCHITECTURE} == set()
