"""Every error that may reach a caller, by what the caller should do next.

    FerrymanError
    ├── InvalidRequest     change the request                         INVALID_ARGUMENT     400
    │   ├── TooLarge       send less                                  INVALID_ARGUMENT     413
    │   └── UnknownModel   name a model that is served                NOT_FOUND            404
    ├── NotFound           the thing named is not here                NOT_FOUND            404
    ├── Exhausted          back off, then try here again              RESOURCE_EXHAUSTED   429
    │   ├── OutOfSlots     a pool has no room for the demand
    │   └── QueueFull      a bounded queue is full
    ├── Stale              start again one level up                   ABORTED              503
    │   ├── LeaseLost      the lease or reservation is gone
    │   └── WrongEpoch     the message speaks to an earlier process
    ├── ManifestMismatch   nobody retries; model or layout differ     FAILED_PRECONDITION  503
    ├── Unavailable        same call, other worker                    UNAVAILABLE          503
    ├── CorruptState       recompute, and tell someone                DATA_LOSS            503
    ├── DeadlineExceeded   the caller's time is over                  DEADLINE_EXCEEDED    504
    └── Cancelled          the caller went away                       CANCELLED            499

Configuration mistakes (`ConfigError`) never travel: the process that finds one prints it and exits
with 2. Anything else is a bug: INTERNAL, message withheld, traceback in the log.
"""

from __future__ import annotations


class FerrymanError(Exception):
    """A failure with a status; `code` names a gRPC status, `http_status` its HTTP twin."""

    code = "INTERNAL"
    http_status = 500

    @property
    def reason(self) -> str:
        """The typed reason that travels beside the status: the class's own name."""
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


class UnknownModel(InvalidRequest):
    """No such model is served here."""

    code = "NOT_FOUND"
    http_status = 404


class NotFound(FerrymanError):
    """The request id, reservation or unit named is not known here."""

    code = "NOT_FOUND"
    http_status = 404


class Exhausted(FerrymanError):
    """There is no room now; `retry_after_seconds` is a guess at when there will be."""

    code = "RESOURCE_EXHAUSTED"
    http_status = 429

    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class OutOfSlots(Exhausted):
    """A pool cannot give what a plan demands."""


class QueueFull(Exhausted):
    """A bounded queue refuses one more."""


class Stale(FerrymanError):
    """What the message refers to has been replaced; start again one level up."""

    code = "ABORTED"
    http_status = 503


class LeaseLost(Stale):
    """The lease or reservation ended before the message came."""


class WrongEpoch(Stale):
    """The message speaks to an earlier life of this process."""


class ManifestMismatch(FerrymanError):
    """Two sides describe cached state differently; `differences` says how, one line each."""

    code = "FAILED_PRECONDITION"
    http_status = 503

    def __init__(self, differences: tuple[str, ...]) -> None:
        super().__init__("state manifests differ: " + "; ".join(differences))
        self.differences = differences


class Unavailable(FerrymanError):
    """This worker cannot serve the call now; another may."""

    code = "UNAVAILABLE"
    http_status = 503


class CorruptState(FerrymanError):
    """Cached or transferred bytes are not the bytes that were written."""

    code = "DATA_LOSS"
    http_status = 503


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
