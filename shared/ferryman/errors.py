"""Every error that may reach a caller, grouped by the caller's next action.

    FerrymanError
    ├── InvalidRequest     change the request                         INVALID_ARGUMENT     400
    │   ├── TooLarge       send less                                  INVALID_ARGUMENT     413
    │   ├── UnsupportedMedia  send JSON, in a coding that is read     INVALID_ARGUMENT     415
    │   ├── ContextLengthExceeded  shorten the prompt                 INVALID_ARGUMENT     400
    │   ├── GrammarDeadEnd  the output's grammar leaves no token      INVALID_ARGUMENT     400
    │   ├── GrammarTooSlow  the output's grammar holds up others      INVALID_ARGUMENT     400
    │   └── UnknownModel   name a model that is served                NOT_FOUND            404
    ├── Unauthenticated    show a key or token that is known here     UNAUTHENTICATED      401
    ├── PermissionDenied   the caller's role may not call this        PERMISSION_DENIED    403
    ├── NotFound           the named thing is not here                NOT_FOUND            404
    ├── Exhausted          back off, then try here again              RESOURCE_EXHAUSTED   429
    │   ├── OutOfSlots     a pool has no room for the demand
    │   ├── QueueFull      a bounded queue is full
    │   ├── RateLimited    the tenant has used its share of this minute, or has too much under way
    │   └── Overloaded     the answer would come after the caller's deadline
    ├── Stale              start again one level up                   ABORTED              503
    │   ├── LeaseLost      the lease or reservation is gone
    │   ├── WrongEpoch     the message is for an earlier process
    │   ├── TakenOver      another router goes on with the request
    │   └── RequestIdInUse another router has a request of this id
    ├── ManifestMismatch   do not retry; model or layout differ       FAILED_PRECONDITION  503
    ├── Unavailable        same call, other worker                    UNAVAILABLE          503
    │   ├── Unreachable    the called process did not answer
    │   ├── NoWorker       a role has no worker, and none came in time
    │   ├── Stopping       this process ends; its successor may serve the call
    │   ├── RequestDetached   the worker drains, and keeps the request's state for a while
    │   ├── Suspect        do not send it again: workers died while they ran it
    │   └── NonFiniteLogits   the named worker computes NaN or infinity
    ├── CorruptState       recompute, and report it                   DATA_LOSS            503
    │   └── NonFiniteState reused state gave NaN or infinity, and is dropped
    ├── DeadlineExceeded   the caller's time is over                  DEADLINE_EXCEEDED    504
    └── Cancelled          the caller went away                       CANCELLED            499

Configuration mistakes (`ConfigError`) never travel: the process that finds one prints it and exits
with 2. Any other exception is a bug: INTERNAL, message withheld, traceback in the log.
"""

from __future__ import annotations


class FerrymanError(Exception):
    """A failure with a status; `code` names a gRPC status, `http_status` its HTTP twin.
    `retry_after_seconds` is a guess at when the same call may succeed, 0 if there is none."""

    code = "INTERNAL"
    http_status = 500
    retry_after_seconds: float = 0.0

    @property
    def reason(self) -> str:
        """The typed reason that is sent with the status: the class's own name."""
        return type(self).__name__


class InvalidRequest(FerrymanError):
    """The request can never succeed as it is; `param` names the field to change."""

    code = "INVALID_ARGUMENT"
    http_status = 400

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class TooLarge(InvalidRequest):
    """A size limit is exceeded."""

    http_status = 413


class UnsupportedMedia(InvalidRequest):
    """The body is of a type, or in a coding, that is not read; `param` names the header."""

    http_status = 415


class ContextLengthExceeded(InvalidRequest):
    """Prompt and output together do not fit the model, or any pair of workers."""


class GrammarDeadEnd(InvalidRequest):
    """The request's grammar leaves no token of this vocabulary, or is too complex to go on with."""


class GrammarTooSlow(InvalidRequest):
    """The request's grammar takes so long for each token that all other requests wait for it."""


class UnknownModel(InvalidRequest):
    """No such model is served here."""

    code = "NOT_FOUND"
    http_status = 404


class Unauthenticated(FerrymanError):
    """The caller did not show a key or token that is known here."""

    code = "UNAUTHENTICATED"
    http_status = 401


class PermissionDenied(FerrymanError):
    """The caller is known, and its role may not do this."""

    code = "PERMISSION_DENIED"
    http_status = 403


class NotFound(FerrymanError):
    """The request id, reservation or unit named is not known here."""

    code = "NOT_FOUND"
    http_status = 404


class Exhausted(FerrymanError):
    """There is no room now; `retry_after_seconds` is a guess at when there will be room."""

    code = "RESOURCE_EXHAUSTED"
    http_status = 429

    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class OutOfSlots(Exhausted):
    """A pool has fewer free slots than a plan demands."""


class QueueFull(Exhausted):
    """A bounded queue is full."""


class RateLimited(Exhausted):
    """The caller's tenant has used what it may in a minute, or has too many requests under way."""


class Overloaded(Exhausted):
    """The work that waits before the request would delay its answer past the caller's deadline."""


class Stale(FerrymanError):
    """The object that the message refers to was replaced; start again one level up."""

    code = "ABORTED"
    http_status = 503


class LeaseLost(Stale):
    """The lease or reservation ended before the message came."""


class WrongEpoch(Stale):
    """The message is for an earlier process."""


class TakenOver(Stale):
    """Another router goes on with the request, because its client asked that one to."""


class RequestIdInUse(Stale):
    """A worker has a request of this id from another router; under another id it can be served."""


class ManifestMismatch(FerrymanError):
    """Two sides describe cached state differently; `differences` has one line for each."""

    code = "FAILED_PRECONDITION"
    http_status = 503

    def __init__(self, differences: tuple[str, ...]) -> None:
        super().__init__("state manifests differ: " + "; ".join(differences))
        self.differences = differences


class Unavailable(FerrymanError):
    """This worker cannot serve the call now; another may."""

    code = "UNAVAILABLE"
    http_status = 503


class Unreachable(Unavailable):
    """A call got no answer: the called process died, or the connection to it broke."""


class NoWorker(Unavailable):
    """A role has had no worker for longer than the router's patience, or than the caller's time;
    `retry_after_seconds` is a guess at when there will be one."""

    def __init__(self, message: str, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Stopping(Unavailable):
    """This process is ending: it cannot serve the call, or cannot finish it. Another one, or its
    successor, may in a moment."""

    retry_after_seconds = 1.0


class RequestDetached(Unavailable):
    """The worker stopped the request between two steps, so that it goes on at another one."""


class Suspect(Unavailable):
    """Workers died again and again while they ran this request; it is not sent to another one."""


class NonFiniteLogits(Unavailable):
    """The named worker computed NaN or infinity instead of logits."""


class CorruptState(FerrymanError):
    """Cached or transferred bytes are not the bytes that were written."""

    code = "DATA_LOSS"
    http_status = 503


class NonFiniteState(CorruptState):
    """Reused state gave NaN or infinity instead of logits; no tier keeps that state."""


class DeadlineExceeded(FerrymanError):
    """The caller's deadline passed."""

    code = "DEADLINE_EXCEEDED"
    http_status = 504


class Cancelled(FerrymanError):
    """The caller cancelled, or is gone."""

    code = "CANCELLED"
    http_status = 499


class ConfigError(Exception):
    """A setting, a flag or a model folder is unusable; the message says what to change."""
