"""The ends of attempts: what each means for the request, what it counts, whether another follows.
Pure.

Retryable      something is wrong with this one attempt      charged to the retry budget
CutOff         a connection broke, and both ends live        not charged
WorkerLost     the worker died: one event for all it had     not charged
WorkerDrains   it goes on elsewhere, with its state           not charged
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from ferryman.errors import (
    Cancelled,
    Exhausted,
    FerrymanError,
    InvalidRequest,
    ManifestMismatch,
    NotFound,
    RequestDetached,
    TakenOver,
    Unavailable,
    Unreachable,
)
from ferryman.schedule.request import FinishReason
from ferryman.wire.values import StreamFinished, Usage
from ferryman_router.routing.fleet import WorkerName


class WorkerGone(Unavailable):
    """The worker died, or must be treated as dead."""


class CallBroken(Unreachable):
    """The router's own call to a worker broke; a worker that cannot reach another one raises
    Unreachable itself."""


class RetriesExhausted(Unavailable):
    """It was tried as often as one request, or all together, may be."""


@dataclass(frozen=True, slots=True)
class AttemptFinished:
    """The last token is here; `usage` as the worker counted it."""

    reason: FinishReason
    usage: Usage


@dataclass(frozen=True, slots=True)
class AttemptStopped:
    """A stop string ended the answer: the router knows that, the worker does not yet."""


@dataclass(frozen=True, slots=True)
class NoCapacity:
    """No room there: nothing happened, and it may be tried elsewhere or later."""

    error: Exhausted


@dataclass(frozen=True, slots=True)
class Retryable:
    """This attempt is lost; another may do better."""

    error: FerrymanError


@dataclass(frozen=True, slots=True)
class CutOff:
    """A connection broke under the attempt, and the worker at its end lives."""

    error: FerrymanError


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker died that the attempt needed. `was_running`: it was at work on this request."""

    error: WorkerGone
    name: WorkerName
    was_running: bool


@dataclass(frozen=True, slots=True)
class WorkerDrains:
    """The decode worker has stopped the request, as the router asked, and keeps its state."""

    error: RequestDetached


@dataclass(frozen=True, slots=True)
class Fatal:
    """Every attempt would end like this."""

    error: FerrymanError


LostAttempt = NoCapacity | Retryable | CutOff | WorkerLost | WorkerDrains | Fatal
Verdict = AttemptFinished | AttemptStopped | LostAttempt

_HOPELESS = (InvalidRequest, ManifestMismatch, NotFound, TakenOver)


def classify(error: FerrymanError) -> Verdict:
    """The meaning of a worker's refusal or failure for the request.

    A worker's DeadlineExceeded means that a call of its own ran out of time. The router itself
    knows whether the caller's deadline has passed.
    """
    if isinstance(error, Exhausted):
        return NoCapacity(error)
    if isinstance(error, Unreachable):
        return CutOff(error)
    if isinstance(error, RequestDetached):
        return WorkerDrains(error)
    return Fatal(error) if isinstance(error, _HOPELESS) else Retryable(error)


def judge_finish(finished: StreamFinished) -> Verdict:
    """The meaning of a decode worker's last frame for the request.

    The router gets no frames of an attempt that it cancelled itself. So `cancelled` in a last
    frame is an attempt that the worker ended: lost, and never an answer's finish reason.
    """
    if finished.reason is FinishReason.CANCELLED:
        return Retryable(Cancelled("the decode worker gave the request up, unasked"))
    return AttemptFinished(finished.reason, finished.usage)


MAX_ATTEMPTS = 3
# Of one role without a new token in between, and in all.
MAX_DEATHS_IN_A_ROW = 2
MAX_DEATHS = 3


@dataclass(frozen=True, slots=True)
class DeathNoted:
    """A worker was lost while it ran the request, which had so many tokens by then."""

    name: WorkerName
    num_tokens: int

    @property
    def place(self) -> tuple[str, int]:
        """The same prompt or token ends the same kind of worker."""
        return self.name.role, self.num_tokens


@dataclass(slots=True)
class AttemptCount:
    """The failures and deaths of one request so far. Neither being refused for lack of room nor
    the death of a worker is a failed try.

    A request that kills workers does so at one place; chance kills them anywhere:

        tokens when a worker died    0 (prefill)                 accused: tried once more, alone
                                     0 (prefill)  0 (prefill)    suspect: two at one place
                                     0 (prefill)  0 (decode)     not yet: prefill bore it
                                     0 (decode)   4 (decode)     not yet: it gets further each time
                                     0  4  9                     suspect: three in all
                                     0  |  0                     not: one of the two came back
    """

    num_failed: int = 0
    deaths: tuple[DeathNoted, ...] = ()

    def failed(self) -> None:
        """An attempt failed, and no worker died of it."""
        self.num_failed += 1

    def ran_at_a_death(self, name: WorkerName, num_tokens: int) -> None:
        """A worker died, or must be treated as dead, while it was at work on this request."""
        self.deaths += (DeathNoted(name, num_tokens),)

    def came_back(self, name: WorkerName) -> None:
        """The worker process is still alive; it was only silent or unreachable."""
        self.deaths = tuple(death for death in self.deaths if death.name != name)

    def is_accused(self, num_tokens: int) -> bool:
        """Whether a worker died while it ran this request, which has drawn no token since."""
        return any(death.num_tokens == num_tokens for death in self.deaths)

    @property
    def is_suspect(self) -> bool:
        """Whether its workers die too often for chance; no other may be put at risk."""
        # Tokens only become more: deaths at the latest place are those since the latest token.
        latest = max((death.num_tokens for death in self.deaths), default=0)
        in_a_row = Counter(death.place for death in self.deaths if death.num_tokens == latest)
        at_one_place = max(in_a_row.values(), default=0)
        return at_one_place >= MAX_DEATHS_IN_A_ROW or len(self.deaths) >= MAX_DEATHS

    @property
    def may_go_on(self) -> bool:
        return self.num_failed < MAX_ATTEMPTS and not self.is_suspect


def settled_usage(
    prompt: Usage | None, output: Usage | None, prompt_len: int, num_generated: int
) -> Usage:
    """The first attempt's cache counts, at most the prompt; the last one's drafts, and what its
    decode worker had; lengths are the router's own."""
    usage = Usage(prompt_len, num_generated)
    if prompt is not None:
        cached = prompt.cached.at_most(prompt_len)
        kept = min(prompt.kept_tokens, prompt_len)
        usage = replace(usage, cached=cached, uncached=prompt.uncached, kept_tokens=kept)
    if output is None:
        return usage
    accepted = min(output.accepted_tokens, num_generated)
    return replace(
        usage,
        drafted_tokens=output.drafted_tokens,
        accepted_tokens=accepted,
        at_decode=output.at_decode.at_most(prompt_len),
    )


def uncached_tokens(usage: Usage, page_size: int) -> dict[str, int]:
    """Tokens computed, by reason: pages times their size, the partial last page as it is."""
    left = usage.prompt_tokens - usage.cached.total
    by_reason: dict[str, int] = {}
    # The plan names reasons in the order of pages, so the last is the one that is cut short.
    for some in usage.uncached:
        tokens = min(left, some.pages * page_size)
        if tokens:
            by_reason[some.reason] = by_reason.get(some.reason, 0) + tokens
            left -= tokens
    return by_reason
