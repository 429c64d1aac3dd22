"""A start beat: how far a worker that starts is, once a second, on the subject of its heartbeats.

It is no heartbeat: nothing can be sent to the worker yet. Routers wait for a start that advances,
as do their starters, and tell refused callers what the cluster is doing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from ferryman.errors import InvalidRequest
from ferryman.wire.nats.heartbeat import (
    NO_BEAT,
    VERSION,
    Heartbeat,
    check_values,
    heartbeat_from_bytes,
    heartbeat_to_bytes,
    role_serves,
)


class StartPhase(StrEnum):
    """The phases of a worker's start; loops may be compiled within any of them."""

    BEGINNING = "beginning"
    READING = "reading the model's files"
    LOADING = "loading weights"
    COMPILING = "compiling loops"
    WARMING_UP = "running first steps"
    CONNECTING = "connecting"


@dataclass(frozen=True, slots=True)
class StartBeat:
    """One start beat. `done` counts bytes of files or compiled loops, of `total` if that is
    known, else 0. `seconds` are those since the process began."""

    role: str
    worker_id: str
    epoch: int
    phase: StartPhase
    done: int
    total: int
    seconds: float

    @property
    def progress(self) -> tuple[StartPhase, int, int]:
        """The part of the beat that changes only while the start advances."""
        return self.phase, self.done, self.total

    @property
    def doing(self) -> str:
        """The phase and how far it is, for people."""
        if self.total:
            return f"{self.phase}, {self.done / self.total:.0%} done"
        return f"{self.phase}, {self.done} so far" if self.done else str(self.phase)

    def serves(self, role: str) -> bool:
        """Whether it will take requests as a worker of `role`."""
        return role_serves(self.role, role)


Beat = Heartbeat | StartBeat


def beat_to_bytes(beat: Beat) -> bytes:
    """The payload of either kind of beat."""
    if isinstance(beat, Heartbeat):
        return heartbeat_to_bytes(beat)
    return json.dumps({"v": VERSION, **asdict(beat)}, separators=(",", ":")).encode()


def beat_from_bytes(payload: bytes) -> Beat:
    """Inverse of `beat_to_bytes`. Raises InvalidRequest for a payload that is neither."""
    start = _start_in(payload)
    return heartbeat_from_bytes(payload) if start is None else start


def _start_in(payload: bytes) -> StartBeat | None:
    """A heartbeat has no phase."""
    try:
        raw: Any = json.loads(payload)
        if not isinstance(raw, Mapping) or "phase" not in raw:
            return None
        values = dict(raw)
        if values.pop("v") != VERSION:
            raise InvalidRequest(f"no beat of version {VERSION}")
        beat = StartBeat(**{**values, "phase": StartPhase(values["phase"])})
    except NO_BEAT as error:
        raise InvalidRequest(f"these bytes are no beat: {error!r}") from error
    check_values(beat)
    return beat
