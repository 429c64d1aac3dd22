"""Beats: readable JSON, once a second, on `worker.<role>.<id>.beat`.

The router knows workers only by their heartbeats. They depend on the worker's step counter: a
worker whose engine is stuck is silent, even if its event loop runs. Routers beat, too, for people
and for `ferryman roll`; other routers pass over that.

A worker that starts sends start beats, which say how far it is. They are no heartbeats: nothing can
be sent to the worker yet. Routers wait for a start that advances, as do their starters, and tell
refused callers what the cluster is doing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ferryman.cache.manifest import ANY_ARITHMETIC, Exactness, Kind, ResumeShape, StateManifest
from ferryman.errors import InvalidRequest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

VERSION = 1
PREFILL, DECODE, BOTH, HOSTCACHE = "prefill", "decode", "both", "hostcache"
ROUTER = "router"
HEARTBEAT_SECONDS = 1.0
LIMIT = 2**64  # of every number in a beat
_PLAIN = {"str": (str,), "bool": (bool,), "int": (int,), "float": (int, float)}
# JSON can be nested too deeply, and its Infinity is no integer.
NO_BEAT = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RecursionError,
    OverflowError,
)


@dataclass(frozen=True, slots=True)
class ServedState:
    """The kind of state that a worker keeps: two workers with equal values can hand requests over.

    `fingerprint`, `page_size` and `digest` are the manifest's, and name the root of all page keys.
    `arithmetic` is part of the digest, too.
    """

    fingerprint: str
    page_size: int
    digest: str
    kinds: tuple[Kind, ...]
    window_len: int = 0
    arithmetic: str = ANY_ARITHMETIC

    @classmethod
    def of(cls, manifest: StateManifest) -> ServedState:
        return cls(
            manifest.fingerprint,
            manifest.page_size,
            manifest.digest,
            manifest.kinds,
            manifest.window_len,
            manifest.arithmetic,
        )

    @property
    def exactness(self) -> Exactness:
        return Exactness.under(self.arithmetic)

    def is_unlike(self, other: ServedState) -> bool:
        """Whether the two are of one model, and their arithmetics keep them apart."""
        same = (self.fingerprint, self.page_size) == (other.fingerprint, other.page_size)
        return same and self.arithmetic != other.arithmetic

    @property
    def resume_shape(self) -> ResumeShape:
        return ResumeShape(self.page_size, self.window_len, frozenset(self.kinds))


NO_STATE = ServedState("", 0, "", ())  # of a process that has received none yet


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One heartbeat. Seconds are measured by the sender itself, 0 before the first measurement.

    `is_ready` is false while it drains, and at a router that knows of no workers. `max_len` bounds
    prompt and output of one request there; `max_requests` is how many it can hold, running and
    reserved, if that is more than `max_running`; `queue_tokens` is the prefill work
    that waits or runs. `node` is the node id of the host-cache that the worker is attached to, or
    its own. `num_steps` counts the engine's steps, `draft_steps` a step once for each request that
    drafts in it; `accepted_tokens` of the `drafted_tokens` were right. `free_slots` of the
    `pool_slots` of each kind hold nothing; an older sender does not say how many there are.

    A worker gives the seconds per byte of a load from the host, the bytes of a page of all its
    paged kinds and of a snapshot, and the seconds of a hand-off after its prompt was computed. A
    host-cache gives the seconds per byte from its storage and from a peer, and the least gain in
    tokens of a prefetch (`prefetch_threshold`). `planes` are the data planes that a worker can use,
    `start_seconds` how long it took from the beginning of its process until it was ready. A worker
    `is_quarantined` once an audit has found wrong state there: it serves, and reuses nothing.
    `limit` says why fewer requests run at once than were asked for, and which setting gives more.
    `cache_usage` is the share of its page slots that requests hold; the rest is free or cached.
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
    max_requests: int = 0
    num_queued: int = 0
    queue_tokens: int = 0
    seconds_per_token: float = 0.0
    step_seconds: float = 0.0
    num_steps: int = 0
    draft_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    free_slots: Mapping[Kind, int] = field(default_factory=dict)
    pool_slots: Mapping[Kind, int] = field(default_factory=dict)
    node: str = ""
    load_seconds_per_byte: float = 0.0
    storage_seconds_per_byte: float = 0.0
    peer_seconds_per_byte: float = 0.0
    page_bytes: int = 0
    snapshot_bytes: int = 0
    prefetch_threshold: int = 0
    start_seconds: float = 0.0
    planes: tuple[str, ...] = ("grpc",)
    handoff_seconds: float = 0.0
    is_quarantined: bool = False
    limit: str = ""
    cache_usage: float = 0.0

    def serves(self, role: str) -> bool:
        """Whether it takes requests as a worker of `role`: a worker that does both has two."""
        return role_serves(self.role, role)


def role_serves(of_worker: str, role: str) -> bool:
    """Whether a worker with the role `of_worker` takes requests as one of `role`."""
    return of_worker == role or (of_worker == BOTH and role in (PREFILL, DECODE))


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
    return json.dumps({"v": VERSION, **asdict(beat)}, separators=(",", ":")).encode()


def beat_from_bytes(payload: bytes) -> Beat:
    """Inverse of `beat_to_bytes`. A field that is not known here is passed over: during a rolling
    update the sender may be newer. Raises InvalidRequest for a payload of another version, or with
    a value that is none of its field: receivers calculate with it."""
    try:
        raw: dict[str, Any] = json.loads(payload)
        if raw.pop("v") != VERSION:
            raise InvalidRequest(f"no beat of version {VERSION}")
        # A heartbeat has no phase.
        beat = _start_beat(raw) if "phase" in raw else _heartbeat(raw)
    except NO_BEAT as error:
        raise InvalidRequest(f"these bytes are no beat: {error!r}") from error
    _check_values(beat)
    if isinstance(beat, Heartbeat):
        _check_values(beat.state)
    return beat


def _start_beat(raw: Mapping[str, Any]) -> StartBeat:
    return StartBeat(**{**_known(StartBeat, raw), "phase": StartPhase(raw["phase"])})


def _heartbeat(raw: dict[str, Any]) -> Heartbeat:
    state = raw.pop("state")
    kinds = tuple(Kind(kind) for kind in state.pop("kinds"))
    slots = _by_kind(raw.pop("free_slots"))
    pools = _by_kind(raw.pop("pool_slots", {}))
    planes = tuple(str(plane) for plane in raw.pop("planes", ("grpc",)))
    served = ServedState(kinds=kinds, **_known(ServedState, state))
    values = _known(Heartbeat, raw)
    return Heartbeat(state=served, free_slots=slots, pool_slots=pools, planes=planes, **values)


def _by_kind(raw: Mapping[str, Any]) -> dict[Kind, int]:
    return {Kind(kind): int(slots) for kind, slots in raw.items()}


def _known(part: type[DataclassInstance], raw: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `raw` for which `part` has a field."""
    names = {declared.name for declared in fields(part)}
    return {name: value for name, value in raw.items() if name in names}


def _check_values(part: DataclassInstance) -> None:
    """Raises InvalidRequest for a value that is none of its field."""
    for declared in fields(part):
        value, types = getattr(part, declared.name), _PLAIN.get(str(declared.type))
        is_other = types is not None and type(value) not in types
        # NaN fails this comparison too.
        if is_other or (isinstance(value, int | float) and not 0 <= value < LIMIT):
            raise InvalidRequest(f"these bytes are no beat: {declared.name} is {value!r:.80}")
