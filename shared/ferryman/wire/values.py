"""What messages between services mean, as plain values: no generated class, no socket.

Seconds are what is left or what has passed at the moment of sending; nobody sends a wall time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ferryman.cache.manifest import Kind
from ferryman.handoff.offsets import TokenFrame
from ferryman.handoff.usage import CachedTokens
from ferryman.handoff.values import PageRange, UnitDigest
from ferryman.schedule.batch import Sampled
from ferryman.schedule.request import FinishReason, Request
from ferryman.wire.planes import GrpcPlane, PlaneOffer


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What travels with a request to everyone who works on it. `attempt` counts from 1."""

    request_id: str
    attempt: int
    deadline_seconds: float
    age_seconds: float = 0.0
    traceparent: str = ""
    tenant_salt: bytes = b""


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """One life of one worker, and where it listens."""

    worker_id: str
    address: str
    epoch: int


@dataclass(frozen=True, slots=True)
class UncachedPages:
    """So many pages were computed anew for one reason of the resume plan."""

    reason: str
    pages: int


@dataclass(frozen=True, slots=True)
class Usage:
    """A request's tokens, and where the beginning of its prompt came from.

    Of `drafted_tokens`, which were verified, `accepted_tokens` are among those generated.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached: CachedTokens = field(default_factory=CachedTokens)
    uncached: tuple[UncachedPages, ...] = ()
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as a value: `code` is the gRPC status's name, `reason` the error's class."""

    code: str
    reason: str
    message: str
    param: str = ""
    retry_after_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PrefillOrder:
    """The router's order to a prefill worker: compute, then hand off to `decode`."""

    context: RequestContext
    worker_epoch: int
    decode: WorkerAddress
    router_id: str
    request: Request
    manifest_digest: str


@dataclass(frozen=True, slots=True)
class KindPlan:
    """How many units of one kind a plan reuses, loads and allocates."""

    kind: Kind
    reused: int
    loaded: int
    allocated: int


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What a resume plan decided; `recurrent` is clear, copy, load or receive.

    Seconds are those that the plan reckoned with: to load `load_bytes`, to compute the rest, and
    to compute what is loaded instead. `cached` adds up to `position`.
    """

    position: int
    prompt_len: int
    recurrent: str
    kinds: tuple[KindPlan, ...]
    uncached: tuple[UncachedPages, ...]
    snapshots: tuple[int, ...]
    cached: CachedTokens = field(default_factory=CachedTokens)
    load_bytes: int = 0
    load_seconds: float = 0.0
    compute_seconds: float = 0.0
    recompute_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Queued:
    """So many requests are before this one."""

    position: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request has its slots and will run as planned."""

    plan: PlanSummary


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """Positions [start, end) are computed: chunk `index` (from 1) of `count`."""

    index: int
    count: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class HandedOff:
    """Decode has verified everything; `seconds` is from Reserve to the answer of Commit."""

    reservation_id: str
    first: Sampled
    usage: Usage
    num_bytes: int
    seconds: float
    path: str = "grpc"


PrefillProgress = Queued | Admitted | ChunkDone | HandedOff


@dataclass(frozen=True, slots=True)
class ReserveOrder:
    """Prefill's wish for slots; `manifest_json` is read only when the digests differ."""

    context: RequestContext
    worker_epoch: int
    writer: WorkerAddress
    router_id: str
    request: Request
    manifest_digest: str
    manifest_json: str
    offer: PlaneOffer = field(default_factory=GrpcPlane)


@dataclass(frozen=True, slots=True)
class CommitOrder:
    """Prefill's word that all is written, with the token drawn behind the prompt."""

    context: RequestContext
    reservation_id: str
    epoch: int
    written: tuple[PageRange, ...]
    digests: tuple[UnitDigest, ...]
    first: Sampled
    usage: Usage


@dataclass(frozen=True, slots=True)
class AbortOrder:
    """The end of an attempt and all before it; without a reservation, of whatever it holds."""

    request_id: str
    attempt: int
    cause: str
    reservation_id: str = ""
    epoch: int = 0
    is_writer_done: bool = False
    has_failed_writes: bool = False


@dataclass(frozen=True, slots=True)
class TokenCursor:
    """Up to where a router has a request's tokens."""

    request_id: str
    attempt: int
    offset: int


@dataclass(frozen=True, slots=True)
class GoesOn:
    """There will be further tokens."""


@dataclass(frozen=True, slots=True)
class Finished:
    """These were the last tokens."""

    reason: FinishReason
    usage: Usage


Ending = GoesOn | Finished | Failure


@dataclass(frozen=True, slots=True)
class RequestTokens:
    """One request's part of a step's frame; `logprobs` is empty or has one entry per token."""

    request_id: str
    frame: TokenFrame
    logprobs: tuple[Mapping[int, float], ...] = ()
    ending: Ending = field(default_factory=GoesOn)


@dataclass(frozen=True, slots=True)
class StepFrame:
    """What one step made for all requests of one router; `sequence` counts from 1 per stream."""

    epoch: int
    sequence: int
    requests: tuple[RequestTokens, ...]
