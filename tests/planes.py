"""The setting by which tests choose a data plane, and the plane that a setting means."""

from __future__ import annotations

from ferryman.wire.plane_values import GRPC, NIXL, UNLOCKED, PlaneChoice

# NIXL only for tests that ask for it by the name that tells its danger.
CHOICES: dict[str, PlaneChoice] = {GRPC: "grpc", NIXL: "nixl-unlocked"}


def plane_of(choice: str) -> str:
    """The plane between two workers with this setting, once they have their agents."""
    return NIXL if choice in UNLOCKED else GRPC
