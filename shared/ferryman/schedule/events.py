"""Events of the scheduler: values that a worker turns into tokens, transfers and telemetry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.resume import ResumePlan
from ferryman.cache.slots import SlotHandle
from ferryman.schedule.batch import Sampled
from ferryman.schedule.drafting import NOTHING_DRAFTED, DraftCounts
from ferryman.schedule.prompt_scores import PromptScores
from ferryman.schedule.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class SequenceAdmitted:
    """A request got all the slots its prompt needs. `is_resumed` after a retraction."""

    request_id: str
    plan: ResumePlan
    is_resumed: bool


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """Positions [start, end) of a prompt are computed and lie in its pages."""

    request_id: str
    start: int
    end: int
    prompt_len: int


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Tokens of a prompt have their log probabilities. These events are in the order of the tokens,
    and before the first token of the answer."""

    request_id: str
    scores: PromptScores


class Drawn(NamedTuple):
    """A token was drawn; `offset` counts the request's output tokens from 0."""

    request_id: str
    offset: int
    sampled: Sampled


@dataclass(frozen=True, slots=True)
class SequenceHeld:
    """A prompt to hand off is computed; its slots stay until `release_held`."""

    request_id: str
    first: Sampled


@dataclass(frozen=True, slots=True)
class SequenceDetached:
    """A decoding request is paused between two steps; its slots stay until `cancel`.

    They hold the state of all its tokens but the last, which was drawn and is not consumed.
    """

    request_id: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The request has its last token; `num_generated` counts its output tokens."""

    request_id: str
    reason: FinishReason
    num_generated: int
    drafts: DraftCounts = NOTHING_DRAFTED


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The request ended with an error of its own; others go on. It holds nothing any more."""

    request_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Retracted:
    """A request waits again, with its generated tokens, because a pool ran out.

    `request` is the one that waits now: its tokens are the prompt and all generated tokens.
    """

    request_id: str
    num_generated: int
    request: Request


@dataclass(frozen=True, slots=True)
class LoadCorrupt:
    """A tier returned bytes that differ from those written; the request starts over without that
    tier."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ChainDropped:
    """State that begins with page `first` gave numbers that are not finite; the tree dropped all of
    it.

    `was_reused`: the request reused state of others, which may be the cause.
    """

    request_id: str
    first: PageKey
    was_reused: bool


@dataclass(frozen=True, slots=True)
class CachedUnit:
    """One unit the tree now holds."""

    kind: Kind
    page_index: int
    key: PageKey
    handle: SlotHandle


@dataclass(frozen=True, slots=True)
class Cached:
    """A prefix came into the tree. Write-through to the host tier starts from this event."""

    request_id: str
    keys: tuple[PageKey, ...]
    units: tuple[CachedUnit, ...]


@dataclass(frozen=True, slots=True)
class LoadsDone:
    """The host units of a request were read; their leases at the host-cache may end."""

    request_id: str


class AuditResult(StrEnum):
    """The end of an audit. `skipped`: it did not begin; `dropped`: its slots were needed."""

    EQUAL = "equal"
    DIFFERENT = "different"
    DROPPED = "dropped"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class HeldUnit:
    """One unit of a request's last resume set: a page, or a recurrent state at position `index`.

    `key` names a whole page of known tokens, else it is empty. `num_tokens` positions of a page
    are computed; 0 for a recurrent state, which counts as a whole. `origin` is where the request's
    plan had it from.
    """

    kind: Kind
    index: int
    key: PageKey
    handle: SlotHandle
    num_tokens: int
    origin: str


@dataclass(frozen=True, slots=True)
class AuditPair:
    """A unit as a request left it, and the slot in which it was computed again."""

    unit: HeldUnit
    cold: SlotHandle


@dataclass(frozen=True, slots=True)
class AuditOpened:
    """A request will be computed again, once the memory up to these `fresh` slots, which no request
    had before, is written to (`Audits.prepared`): that takes long, and others go on meanwhile."""

    request_id: str
    fresh: Mapping[Kind, int]


@dataclass(frozen=True, slots=True)
class AuditReady:
    """The resume set of `position` was computed again, and can be compared: no step writes to
    these slots. `reuse` names the ways in which the request reused state; `first` is the key of its
    first page, empty if it fills none. `wrong_token` is the position of the first token of the
    answer that came out as another one when it was drawn again."""

    request_id: str
    first: PageKey
    position: int
    pairs: tuple[AuditPair, ...]
    reuse: tuple[str, ...]
    wrong_token: int | None


@dataclass(frozen=True, slots=True)
class AuditDone:
    """An audit ended without a comparison."""

    request_id: str
    result: AuditResult


Event = (
    SequenceAdmitted
    | ChunkDone
    | PromptScored
    | Drawn
    | SequenceHeld
    | SequenceDetached
    | Finished
    | RequestFailed
    | Retracted
    | LoadCorrupt
    | ChainDropped
    | Cached
    | LoadsDone
    | AuditOpened
    | AuditReady
    | AuditDone
)
