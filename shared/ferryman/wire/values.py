"""Messages between services as plain values: no generated class, no socket.

Seconds are time left or time passed at the moment of sending; wall-clock time is never sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ferryman.handoff.effects import WriteFence
from ferryman.handoff.offsets import TokenFrame
from ferryman.handoff.usage import NONE_CACHED, CachedTokens
from ferryman.handoff.values import PageRange, UnitDigest
from ferryman.schedule.batch import Sampled
from ferryman.schedule.prompt_scores import PromptScores
from ferryman.schedule.request import FinishReason, Request
from ferryman.wire.plane_values import GrpcOnly, PlaneOffer


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The context that travels with a request to all its workers. `attempt` counts from 1.
    `adapter` is the hex digest of a LoRA adapter; empty for the model alone. `taken_from` is the
    router that had the request before this one; empty for none."""

    request_id: str
    attempt: int
    deadline_seconds: float
    age_seconds: float = 0.0
    traceparent: str = ""
    tenant_salt: bytes = b""
    adapter: str = ""
    taken_from: str = ""


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """One life of one worker, and its address."""

    worker_id: str
    address: str
    epoch: int


@dataclass(frozen=True, slots=True)
class AttemptSignature:
    """A router's proof that it ordered an attempt: the `serial`-th that it has signed, when
    `lifetime_ms` of its request's deadline were left. Empty in an open cluster."""

    serial: int = 0
    lifetime_ms: int = 0
    value: bytes = b""


NOT_SIGNED = AttemptSignature()


@dataclass(frozen=True, slots=True)
class UncachedPages:
    """Pages that were computed anew for one reason of the resume plan."""

    reason: str
    pages: int


@dataclass(frozen=True, slots=True)
class Usage:
    """A request's tokens, and the tiers that the beginning of its prompt came from.

    All `drafted_tokens` were verified; `accepted_tokens` of them are among the generated tokens.
    Later requests can resume `kept_tokens` deep in the prompt: its state there is kept as long as
    there is room. `at_decode` are tokens whose pages the decode worker had, so that they were not
    sent to it: prefill counts them for itself.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached: CachedTokens = field(default_factory=CachedTokens)
    uncached: tuple[UncachedPages, ...] = ()
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    kept_tokens: int = 0
    at_decode: CachedTokens = NONE_CACHED

    @property
    def written_tokens(self) -> int:
        """The tokens that were computed and whose state is kept."""
        return max(0, self.kept_tokens - self.cached.total)

    @property
    def of_output(self) -> Usage:
        """Without the prompt, for another answer to the same one."""
        return replace(
            self,
            prompt_tokens=0,
            cached=NONE_CACHED,
            uncached=(),
            kept_tokens=0,
            at_decode=NONE_CACHED,
        )


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
    """The router's order to a prefill worker: compute, then hand off to `decode`. Other workers
    have the first `unlike_pages` pages, in another arithmetic."""

    context: RequestContext
    worker_epoch: int
    decode: WorkerAddress
    router_id: str
    request: Request
    manifest_digest: str
    unlike_pages: int = 0
    signature: AttemptSignature = NOT_SIGNED


@dataclass(frozen=True, slots=True)
class PrefillQueued:
    """The worker has accepted the order."""


@dataclass(frozen=True, slots=True)
class PrefillAdmitted:
    """The request has its slots; `usage` counts what its resume plan reuses of the prompt."""

    usage: Usage


@dataclass(frozen=True, slots=True)
class PrefillChunkDone:
    """All positions before `end` are computed."""

    end: int


@dataclass(frozen=True, slots=True)
class PrefillHandedOff:
    """Decode has verified everything; `seconds` is from Reserve to the answer of Commit."""

    usage: Usage
    num_bytes: int
    seconds: float


PrefillProgress = (
    PrefillQueued | PrefillAdmitted | PrefillChunkDone | PromptScores | PrefillHandedOff
)


@dataclass(frozen=True, slots=True)
class ReserveOrder:
    """Prefill's request for slots; `manifest_json` is read only when the digests differ. Of a
    request that moves, `drawn_token_id` is the token behind those of `request`; None otherwise."""

    context: RequestContext
    worker_epoch: int
    writer: WorkerAddress
    router_id: str
    request: Request
    manifest_digest: str
    manifest_json: str
    offer: PlaneOffer = field(default_factory=GrpcOnly)
    signature: AttemptSignature = NOT_SIGNED
    drawn_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class CommitOrder:
    """Prefill's message that all units are written, with the token drawn after the prompt, and the
    value of the attempt's signature."""

    context: RequestContext
    reservation_id: str
    epoch: int
    written: tuple[PageRange, ...]
    digests: tuple[UnitDigest, ...]
    first: Sampled
    usage: Usage
    signature: bytes = b""


@dataclass(frozen=True, slots=True)
class RouterAbort:
    """The request's own router ends an attempt and all before it, in any state."""

    request_id: str
    attempt: int
    cause: str
    router_id: str
    signature: bytes = b""


@dataclass(frozen=True, slots=True)
class WriterAbort:
    """A writer gives up its reservation and writes no more. It cannot end what was committed."""

    request_id: str
    fence: WriteFence
    cause: str
    has_failed_writes: bool = False


AbortOrder = RouterAbort | WriterAbort


@dataclass(frozen=True, slots=True)
class StopOrder:
    """Decode gave up a reservation: its writer, in the life `worker_epoch`, is to write no more."""

    request_id: str
    attempt: int
    reservation_id: str
    worker_epoch: int


@dataclass(frozen=True, slots=True)
class StopAnswer:
    """A writer's answer to a StopOrder, and the life that gives it. `has_failed_writes`: of some
    writes the writer does not know whether they landed."""

    is_stopped: bool
    has_failed_writes: bool
    worker_epoch: int


@dataclass(frozen=True, slots=True)
class TokenCursor:
    """The offset up to which a router has a request's tokens."""

    request_id: str
    attempt: int
    offset: int


@dataclass(frozen=True, slots=True)
class StreamContinues:
    """There will be further tokens. With the first one: the tokens of the prompt that the decode
    worker held itself."""

    held: CachedTokens = NONE_CACHED


@dataclass(frozen=True, slots=True)
class StreamFinished:
    """These were the last tokens."""

    reason: FinishReason
    usage: Usage


Ending = StreamContinues | StreamFinished | Failure


@dataclass(frozen=True, slots=True)
class RequestTokens:
    """One request's part of a step's frame; `logprobs` is empty or has one entry per token."""

    request_id: str
    frame: TokenFrame
    logprobs: tuple[Mapping[int, float], ...] = ()
    ending: Ending = field(default_factory=StreamContinues)
