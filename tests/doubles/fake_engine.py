"""The engine without a model: the same steps, the same slot operations, stamps instead of tensors.

Every read asserts the stamp that the row's own tokens imply. So a state that is lost, swapped,
stale or filed under another length raises WrongStamp with its slot. Tokens are a function of the
prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from tests.doubles.stamps import Hashes, StampSlabs, extended, next_token
from tests.doubles.step_parts import NOWHERE, StepPart, parts_of

from ferryman.cache.keys import TokenIds
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.engine.memory.copy_stream import Copies
from ferryman.engine.memory.loads import AT_ONCE, LoadQueue
from ferryman.engine.memory.transfer import HostTransfer
from ferryman.engine.ops import OnceOnly
from ferryman.schedule.batch import (
    DecodeStep,
    Ints,
    PrefillStep,
    RowSeed,
    Sampled,
    SampleRequest,
    SlotOps,
    SlotSnapshot,
    StepOutcome,
    StepPlan,
    halves_of,
)
from ferryman.schedule.drafting import ON_DEVICE
from ferryman.schedule.prompt_scores import PromptScores, ScoreRequest


class WrongStamp(AssertionError):
    """A slot does not hold the state that its reader needs."""


@dataclass(frozen=True, slots=True)
class FakeStep:
    """A step whose values are already known."""

    done: StepOutcome

    def is_ready(self) -> bool:
        return True

    def outcome(self) -> StepOutcome:
        return self.done


def no_delay(plan: StepPlan) -> None:
    """The pace of a fake engine that takes no time."""


def no_draft_model(prefix: int) -> int:
    """The draft model of a fake engine that has none: it raises WrongStamp."""
    raise WrongStamp("a draft is to be named on the device, and nobody there does")


class FakeEngine:
    """Runs steps on stamped slots. `pace` is called before each step and may block it.

    Loads run when a step begins, the earliest possible time, unless `copies` delays them.
    """

    def __init__(
        self,
        manifest: StateManifest,
        num_slots: Mapping[Kind, int],
        *,
        max_rows: int,
        max_len: int,
        vocab_size: int = 1000,
        pace: Callable[[StepPlan], None] = no_delay,
        copies: Copies = AT_ONCE,
        proposer: Callable[[int], int] = no_draft_model,
    ) -> None:
        self.manifest = manifest
        self.vocab_size = vocab_size
        self.slabs = StampSlabs(manifest, num_slots)
        self.transfer = HostTransfer(self.slabs)
        self.host_tier = LoadQueue(self.transfer, copies)
        self.once = OnceOnly()
        self._rows = [FakeRow(index, max_len) for index in range(max_rows)]
        self._void: set[str] = set()
        self._pace = pace
        self._proposer = proposer

    def run(self, plan: StepPlan) -> StepOutcome:
        return self.launch(plan).outcome()

    def begin(self, plan: StepPlan) -> None:
        self.host_tier.begin(plan.step_id, plan.ops.loads)

    def launch(self, plan: StepPlan) -> FakeStep:
        self._pace(plan)
        plan = self.once.consume(plan)
        parts = tuple(parts_of(plan))
        self._readmit(plan.ops, parts)
        loaded = self.host_tier.arrived(plan.step_id, plan.ops.loads)
        corrupt, report = loaded.corrupt, loaded.report()
        began = perf_counter()
        self._void.update(corrupt)
        self._prologue(plan.ops, parts)
        drafts = self._write_inputs(plan)
        sampled = tuple(drawn for part in parts for drawn in self._forward(part))
        self._write_drawn(parts, sampled)
        for snapshot in plan.ops.snapshots:
            self._freeze(snapshot, parts)
        scores = () if isinstance(plan, DecodeStep) else tuple(map(fake_scores, plan.scores))
        seconds = perf_counter() - began
        return FakeStep(
            StepOutcome(plan.step_id, sampled, corrupt, seconds, report, drafts, scores)
        )

    def _write_inputs(self, plan: StepPlan) -> tuple[int, ...]:
        """Writes the tokens that the rows read: chunks, or drafts. Returns the drafts."""
        halves = halves_of(plan)
        for half in halves:
            for chunk in half.chunks if isinstance(half, PrefillStep) else ():
                self._rows[chunk.row].write(chunk.start, chunk.token_ids)
        decoded = halves[-1]
        return self._write_drafts(decoded) if isinstance(decoded, DecodeStep) else ()

    def _write_drafts(self, plan: DecodeStep) -> tuple[int, ...]:
        drafted = slice(plan.verify_depths[0], None)
        places = zip(plan.rows[drafted].tolist(), plan.positions[drafted].tolist(), strict=True)
        drafts = []
        for (row, position), draft in zip(places, plan.drafts, strict=True):
            known = self._rows[row]
            named = self._proposer(int(known.hashes(position)[-1])) if draft == ON_DEVICE else draft
            known.write(position, [named])
            drafts.append(named)
        return tuple(drafts)

    def _write_drawn(self, parts: Sequence[StepPart], sampled: Sequence[Sampled]) -> None:
        """Writes drawn tokens last: each draw depends on the drafts before it, right or wrong."""
        draws = [(part, draw) for part in parts for draw in part.draws]
        for (part, draw), drawn in zip(draws, sampled, strict=True):
            # A token that an audit draws again in the midst of a chunk is not written.
            if part.request_id not in self._void and draw.position == part.end:
                self._rows[draw.row].write(draw.position, [drawn.token_id])

    def _readmit(self, ops: SlotOps, parts: Sequence[StepPart]) -> None:
        """A request whose bytes were corrupt stays void until it starts anew: this readmits it."""
        fresh = {copy.dst for copy in ops.copies if copy.kind is Kind.RECURRENT} | set(ops.clears)
        fresh |= {load.dst for load in ops.loads if load.unit.kind is Kind.RECURRENT}
        seeded = {seed.row for seed in ops.seeds}
        for part in parts:
            if part.start == 0 or part.read_slot in fresh or part.row in seeded:
                self._void.discard(part.request_id)

    def _prologue(self, ops: SlotOps, parts: Sequence[StepPart]) -> None:
        for copy in ops.copies:
            self.slabs.copy(copy.kind, copy.src, copy.dst)
        for slot in ops.clears:
            self.slabs.clear(Kind.RECURRENT, slot)
        for seed in ops.seeds:
            self._seed(seed)
        for snapshot in ops.saves:
            self._save(snapshot, parts)

    def _seed(self, seed: RowSeed) -> None:
        self._rows[seed.row].write(0, seed.token_ids)

    def _forward(self, part: StepPart) -> Iterator[Sampled]:
        if part.request_id in self._void:
            yield from (Sampled(0, {}) for _ in part.draws)
            return
        hashes = self._rows[part.row].hashes(part.end)
        for kind, table in part.tables.items():
            self._read_pages(part, kind, table, hashes)
            self._write_pages(part, kind, table, hashes)
        if part.write_slot != NOWHERE:
            self._advance(part, hashes)
        for draw in part.draws:
            yield self._draw(part, draw, int(hashes[draw.position]))

    def _read_pages(self, part: StepPart, kind: Kind, table: Ints, hashes: Hashes) -> None:
        """Checks that the pages hold all positions that the first token of the part sees."""
        first, page_size = self._first_visible(kind, part.start), self.manifest.page_size
        positions = np.arange(first, part.start)
        slots = table[positions // page_size]
        self._check_pages_exist(part, kind, positions, slots)
        found = self.slabs.stamps(kind)[slots, positions % page_size]
        wrong = np.flatnonzero(found != hashes[positions + 1])
        if len(wrong):
            at = int(wrong[0])
            raise WrongStamp(
                f"{part.request_id}: {kind} slot {slots[at]} does not hold the state of position "
                f"{positions[at]} that the token at {part.start} needs"
            )

    def _write_pages(self, part: StepPart, kind: Kind, table: Ints, hashes: Hashes) -> None:
        page_size = self.manifest.page_size
        positions = np.arange(part.start, part.end)
        slots = table[positions // page_size]
        needed = positions >= self._first_visible(kind, part.end)
        self._check_pages_exist(part, kind, positions[needed], slots[needed])
        kept = slots >= 0
        positions, slots = positions[kept], slots[kept]
        self.slabs.stamps(kind)[slots, positions % page_size] = hashes[positions + 1]

    def _first_visible(self, kind: Kind, position: int) -> int:
        """The first position that the token at `position` still sees."""
        if kind is Kind.WINDOW:
            return max(0, position - self.manifest.window_len + 1)
        return 0

    def _check_pages_exist(self, part: StepPart, kind: Kind, positions: Ints, slots: Ints) -> None:
        if (slots < 0).any():
            missing = int(positions[np.argmax(slots < 0)])
            raise WrongStamp(f"{part.request_id}: no {kind} page for position {missing}")

    def _advance(self, part: StepPart, hashes: Hashes) -> None:
        self._check_state(part.read_slot, int(hashes[part.start]), part.start, part.request_id)
        states = self.slabs.stamps(Kind.RECURRENT)
        states[part.write_slot, :2] = hashes[part.end], part.end
        for snapshot in part.snapshots:
            self._check_snapshot(part, snapshot)
            states[snapshot.dst, :2] = hashes[snapshot.position], snapshot.position

    def _check_state(self, slot: int, prefix: int, position: int, wanted_by: str) -> None:
        found = self.slabs.stamps(Kind.RECURRENT)[slot, :2].tolist()
        if found != [prefix, position]:
            raise WrongStamp(
                f"{wanted_by}: recurrent slot {slot} holds the state {found[0]:016x} of position "
                f"{found[1]}, not {prefix:016x} of position {position}"
            )

    def _check_snapshot(self, part: StepPart, snapshot: SlotSnapshot) -> None:
        in_chunk = part.start < snapshot.position <= part.end
        on_grid = snapshot.position % self.manifest.page_size == 0
        if not (in_chunk and on_grid and snapshot.src == part.write_slot):
            raise WrongStamp(
                f"{part.request_id}: {snapshot} does not fit [{part.start}, {part.end})"
            )

    def _freeze(self, snapshot: SlotSnapshot, parts: Sequence[StepPart]) -> None:
        for part in parts:
            if part.write_slot == snapshot.src and part.request_id not in self._void:
                prefix = int(self._rows[part.row].hashes(part.end)[part.end])
                if snapshot.position != part.end:
                    raise WrongStamp(f"{part.request_id}: {snapshot} of a state at {part.end}")
                self._check_state(snapshot.src, prefix, part.end, part.request_id)
        self.slabs.copy(Kind.RECURRENT, snapshot.src, snapshot.dst)

    def _save(self, snapshot: SlotSnapshot, parts: Sequence[StepPart]) -> None:
        """As `_freeze`, for the state that the previous step left."""
        part = next(part for part in parts if part.read_slot == snapshot.src)
        prefix = int(self._rows[part.row].hashes(part.start)[part.start])
        if snapshot.position != part.start:
            raise WrongStamp(f"{part.request_id}: {snapshot} of a state at {part.start}")
        self._check_state(snapshot.src, prefix, part.start, part.request_id)
        self.slabs.copy(Kind.RECURRENT, snapshot.src, snapshot.dst)

    def _draw(self, part: StepPart, draw: SampleRequest, prefix: int) -> Sampled:
        first = part.start + 1 if part.is_audit else part.end
        if draw.row != part.row or not first <= draw.position <= part.end:
            raise WrongStamp(f"{part.request_id}: {draw} does not follow position {part.end}")
        token = next_token(prefix, self.vocab_size)
        return Sampled(token, _logprobs(token, draw.params.logprobs, self.vocab_size))


def fake_scores(wanted: ScoreRequest) -> PromptScores:
    """Scores that follow from the tokens and their positions: the token at position i has the log
    probability -i / 8 and the rank i, and the ids behind it are the likeliest."""
    positions = np.arange(wanted.first, wanted.first + len(wanted.token_ids))
    places = np.arange(1 + wanted.num_best)
    token_ids = wanted.token_ids[:, None] + places.astype("<u4")
    logprobs = -positions[:, None] / 8.0 - places
    return PromptScores(wanted.first, token_ids, logprobs, positions.astype(np.uint32))


class FakeRow:
    """The tokens that one row has seen, and the hash of each prefix of them."""

    def __init__(self, index: int, max_len: int) -> None:
        self._index = index
        self._hashes = np.zeros(max_len + 1, np.uint64)
        self._len = 0

    def write(self, position: int, token_ids: Sequence[int] | TokenIds) -> None:
        """Writes tokens from `position` on; all later ones, of another request, are dropped."""
        end = position + len(token_ids)
        if not position <= self._len or end >= len(self._hashes):
            raise WrongStamp(
                f"row {self._index} knows {self._len} of at most {len(self._hashes) - 1} tokens; "
                f"[{position}, {end}) cannot follow"
            )
        self._hashes[position + 1 : end + 1] = extended(int(self._hashes[position]), token_ids)
        self._len = end

    def hashes(self, end: int) -> Hashes:
        """The hashes of all prefixes up to `end` tokens [end + 1]."""
        if end > self._len:
            raise WrongStamp(f"row {self._index} knows {self._len} tokens, a step consumes {end}")
        return self._hashes[: end + 1]


def _logprobs(token: int, count: int, vocab_size: int) -> dict[int, float]:
    """The log probabilities of the chosen token and of the next ids, each e times less likely."""
    if count == 0:
        return {}
    return {(token + i) % vocab_size: -1.0 - i for i in range(min(count, vocab_size))}
