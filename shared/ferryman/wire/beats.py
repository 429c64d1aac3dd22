"""A worker's heartbeat: JSON a person can read, once a second, on `worker.<role>.<id>.beat`.

The router knows workers by nothing else. Beats come from the worker's step counter: a worker whose
engine is stuck falls silent, however lively its event loop is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.errors import InvalidRequest

VERSION = 1
BEAT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ServedState:
    """Which state a worker keeps: two workers with equal values can hand requests over.

    `fingerprint`, `page_size` and `digest` are the manifest's, and name the root of all page keys.
    """

    fingerprint: str
    page_size: int
    digest: str
    kinds: tuple[Kind, ...]
    window_len: int = 0

    @classmethod
    def of(cls, manifest: StateManifest) -> ServedState:
        return cls(
            manifest.fingerprint,
            manifest.page_size,
            manifest.digest,
            manifest.kinds,
            manifest.window_len,
        )


@dataclass(frozen=True, slots=True)
class Beat:
    """One heartbeat. Seconds are measured by the sender itself, 0 while it has none.

    `is_ready` is false while it drains. `max_len` bounds prompt and output of one request there;
    `queue_tokens` is the prefill work that waits or runs. `node` is the node id of the host-cache
    the worker is attached to, or its own. `num_steps` counts the engine's steps; of
    `drafted_tokens` verified in `draft_steps` shares of them `accepted_tokens` were right.

    A worker says what a byte from the host costs it (`load_seconds_per_byte`) and how many bytes
    one page of all its paged kinds and one snapshot have; a host-cache says what a byte costs to
    bring from its storage and from a peer, and below how many tokens it brings nothing
    (`prefetch_threshold`). `planes` are the data planes it can write or read.
    """

    role: str
    worker_id: str
    epoch: int
    address: str
    is_ready: bool
    state: ServedState
    max_len: int
    num_running: int = 0
    max_running: int = 1
    num_queued: int = 0
    queue_tokens: int = 0
    seconds_per_token: float = 0.0
    step_seconds: float = 0.0
    num_steps: int = 0
    draft_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    free_slots: Mapping[Kind, int] = field(default_factory=dict)
    node: str = ""
    load_seconds_per_byte: float = 0.0
    storage_seconds_per_byte: float = 0.0
    peer_seconds_per_byte: float = 0.0
    page_bytes: int = 0
    snapshot_bytes: int = 0
    prefetch_threshold: int = 0
    planes: tuple[str, ...] = ("grpc",)


def beat_to_bytes(beat: Beat) -> bytes:
    return json.dumps({"v": VERSION, **asdict(beat)}, separators=(",", ":")).encode()


def beat_from_bytes(payload: bytes) -> Beat:
    """Inverse of `beat_to_bytes`; InvalidRequest when the payload is no beat of this version."""
    try:
        raw: dict[str, Any] = json.loads(payload)
        if raw.pop("v") != VERSION:
            raise InvalidRequest(f"no beat of version {VERSION}")
        state = raw.pop("state")
        kinds = tuple(Kind(kind) for kind in state.pop("kinds"))
        slots = {Kind(kind): int(free) for kind, free in raw.pop("free_slots").items()}
        planes = tuple(str(plane) for plane in raw.pop("planes", ("grpc",)))
        served = ServedState(kinds=kinds, **state)
        return Beat(state=served, free_slots=slots, planes=planes, **raw)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise InvalidRequest(f"these bytes are no beat: {error!r}") from error
