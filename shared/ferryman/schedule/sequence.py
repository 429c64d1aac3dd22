"""A request: waiting for slots, or holding them."""

from __future__ import annotations

from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import Enum, auto

import numpy as np

from ferryman.cache.keys import PageKey, TokenIds, extend_keys
from ferryman.cache.manifest import Kind
from ferryman.cache.resume import HostView, ResumePlan
from ferryman.cache.slots import Holder, SlotHandle
from ferryman.schedule.batch import SlotCopy
from ferryman.schedule.drafting import NOTHING_DRAFTED, NOTHING_PROPOSED, DraftCounts, Proposals
from ferryman.schedule.request import Request


class Goal(Enum):
    """The step after the prompt: tokens here, or a hand-off to another worker."""

    DECODE = auto()
    HAND_OFF = auto()


class Phase(Enum):
    """The phase of a request that holds slots."""

    RESERVED = auto()
    PREFILLING = auto()
    HELD = auto()
    DECODING = auto()
    RETRACTING = auto()
    DETACHING = auto()
    DONE = auto()


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request without slots. `order` is its arrival: lower goes first, retracted or not."""

    order: int
    request: Request
    goal: Goal
    host: HostView
    was_retracted: bool
    counts: DraftCounts = NOTHING_DRAFTED

    @property
    def num_decoded(self) -> int:
        """Positions that decoding computes here at most: the last drawn token is not consumed."""
        if self.goal is Goal.HAND_OFF:
            return 0
        return max(0, self.request.sampling.max_tokens - self.request.num_generated - 1)


@dataclass(slots=True)
class TrackSlot:
    """A track slot and the position of its state, which is valid once its step has run."""

    handle: SlotHandle
    position: int


@dataclass(slots=True, eq=False, repr=False)
class RunningSequence:
    """A request that holds slots. Only the scheduler writes here.

        0 ≤ anchor_pages·P ≤ position of the plan ≤ scheduled

    `own` are the slots it leases by page index; pages below `anchor_pages` are the tree's and are
    protected by a hold on the anchor. `scheduled` counts positions given to submitted steps.
    `points` are the positions of its prompt that will still be published as resume points;
    `snapshots` holds the slots for their recurrent states.

    A request that `reuses` depends, in part, on state that others computed. Once that state was
    dropped because it is not finite (`is_doubtful`), nothing of the request is published any more.

    `opening` are copies that its first decode step will make; until that is planned, the slots that
    they fill hold no state.

    A request that `drafts` has `scratch` slots for the states after its drafts; one that was
    received takes them when it runs, and drafts as far as it has some. While a step verifies drafts
    (`verifying`), no other step is planned for the request.
    """

    waiting: InitVar[PendingRequest]
    plan: ResumePlan
    _: KW_ONLY
    holder: Holder
    row: int
    own: dict[Kind, dict[int, SlotHandle]]
    spare: list[SlotHandle]
    working: SlotHandle | None
    scratch: list[SlotHandle]
    proposals: Proposals
    snapshots: dict[int, SlotHandle]
    copy_source: tuple[SlotHandle, ...]
    request: Request = field(init=False)
    order: int = field(init=False)
    goal: Goal = field(init=False)
    keys: tuple[PageKey, ...] = field(init=False)
    counts: DraftCounts = field(init=False)
    was_retracted: bool = field(init=False)
    first_output: int = field(init=False)
    points: list[int] = field(init=False)
    anchor_pages: int = field(init=False)
    reuses: bool = field(init=False)
    scheduled: int = field(init=False)
    drafts: bool = field(init=False)
    phase: Phase = Phase.PREFILLING
    is_doubtful: bool = False
    verifying: bool = False
    in_flight: int = 0
    draws_submitted: int = 0
    opening: tuple[SlotCopy, ...] = ()
    drawn: list[int] = field(default_factory=list)
    tracks: list[TrackSlot] = field(default_factory=list)

    def __post_init__(self, waiting: PendingRequest) -> None:
        self.request, self.order, self.goal = waiting.request, waiting.order, waiting.goal
        self.keys, self.counts = waiting.request.keys, waiting.counts
        self.was_retracted = waiting.was_retracted
        self.first_output = waiting.request.prompt_len - waiting.request.num_generated
        plan = self.plan
        self.points, self.anchor_pages = list(plan.snapshots), plan.anchor_pages
        self.reuses = bool(plan.anchor_pages or plan.window_pages or plan.loads)
        self.scheduled = plan.position
        self.drafts = self.proposals is not NOTHING_PROPOSED

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt_len(self) -> int:
        return self.request.prompt_len

    @property
    def working_slot(self) -> int:
        """-1 for a model without recurrent layers: no kernel reads it."""
        return self.working.slot if self.working else -1

    @property
    def num_generated(self) -> int:
        return self.request.num_generated + len(self.drawn)

    @property
    def may_draw(self) -> bool:
        """Whether max_tokens allows a draw beyond those submitted."""
        submitted = self.request.num_generated + self.draws_submitted
        return submitted < self.request.sampling.max_tokens

    @property
    def computed(self) -> int:
        """Positions computed from known tokens: the last draw is not consumed yet."""
        return self.prompt_len + max(0, len(self.drawn) - 1)

    @property
    def frozen(self) -> int:
        """Track slots up to this position are written. The step that is verifying may still write
        the one at `computed`."""
        return self.computed - 1 if self.verifying else self.computed

    def token_ids(self) -> TokenIds:
        drawn = np.array(self.drawn, dtype="<u4")
        return np.concatenate([self.request.token_ids, drawn])

    def extend_keys_to(self, root: PageKey, page_size: int) -> None:
        """Adds the keys of the pages that decoding has filled since."""
        if (len(self.keys) + 1) * page_size <= self.prompt_len + len(self.drawn):
            self.keys = extend_keys(root, self.keys, self.token_ids(), page_size)

    @property
    def num_states(self) -> int:
        """Its slots of recurrent states."""
        others = len(self.snapshots) + len(self.tracks) + len(self.scratch)
        return others + (self.working is not None)

    def slots(self) -> list[SlotHandle]:
        """All slots leased to this request."""
        held = [handle for pages in self.own.values() for handle in pages.values()]
        held += self.spare
        held += self.snapshots.values()
        held += [track.handle for track in self.tracks]
        held += self.scratch
        return held + ([self.working] if self.working else [])
