"""The setting by which tests choose a data plane, the plane that it means, and its warnings."""

from __future__ import annotations

import logging

import pytest

from ferryman.wire.plane_values import GRPC, MEMORY, NIXL, UNLOCKED, PlaneChoice

# NIXL only for tests that ask for it by the name that tells its danger.
CHOICES: dict[str, PlaneChoice] = {GRPC: "grpc", MEMORY: "auto", NIXL: "nixl-unlocked"}


def plane_of(choice: str) -> str:
    """The plane between two workers of this machine with this setting, once they have agents."""
    if choice == "auto":
        return MEMORY
    return NIXL if choice in UNLOCKED else GRPC


def plane_in(planes: tuple[str, ...]) -> str:
    """The best plane that a heartbeat names; memory is named with its place."""
    return planes[0].partition("@")[0]


def warnings_beside_those_of_ports(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of a test's workers, without those of the ports that NIXL opened."""
    warnings = (each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING)
    return [each for each in warnings if "listens without a lock" not in each]
