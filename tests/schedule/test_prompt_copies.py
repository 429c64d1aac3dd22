"""Requests of one prompt decode from one hand-off: copies of its end, under any schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.doubles.stamps import extended, fake_tokens
from tests.harness.schedule import (
    ALL_KINDS,
    ATTENTION,
    HYBRID,
    MANIFESTS,
    PAGE,
    VOCAB,
    RandomDrafts,
    WatchedWorker,
    request,
    worker_for,
)
from tests.schedule.test_hand_off import hand_off

from ferryman.cache.keys import as_token_ids
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.prompt_ends import KEPT_SECONDS
from ferryman.cache.resume import resume_set
from ferryman.cache.slots import Role
from ferryman.errors import NonFiniteState, OutOfSlots
from ferryman.schedule.batch import NO_TOKEN, DecodeStep, Sampled
from ferryman.schedule.drafting import NO_DRAFTS
from ferryman.schedule.events import RequestFailed, Retracted, SequenceDetached
from ferryman.schedule.request import Request
from ferryman.schedule.sequence import Goal

PROMPT = [1] * 9 + [2] * 9


def pair_of(manifest: StateManifest, **sizes: int) -> tuple[WatchedWorker, WatchedWorker]:
    return worker_for(manifest), worker_for(manifest, **sizes)


def handed_off(
    pair: tuple[WatchedWorker, WatchedWorker], asked: Request, *, num_siblings: int = 0
) -> int:
    """The units that travelled for a request."""
    prefill, decode = pair
    prefill.submit(replace(asked, num_siblings=num_siblings), Goal.HAND_OFF)
    prefill.drain()
    return hand_off(prefill, decode, asked.request_id)


def roles(worker: WatchedWorker) -> set[str]:
    return {role for ledger in worker.scheduler.ledgers().values() for role in ledger.by_role}


@pytest.mark.parametrize("model", sorted(MANIFESTS))
@pytest.mark.parametrize("prompt_len", [3, 16, 18], ids=["no page", "whole pages", "a part more"])
def test_siblings_share_pages_and_copy_the_rest_of_one_hand_off(
    model: str, prompt_len: int
) -> None:
    manifest, prompt = MANIFESTS[model], PROMPT[:prompt_len]
    pair = pair_of(manifest)
    decode, pages = pair[1], -(-prompt_len // 4)
    moved = [
        handed_off(pair, request(manifest, f"r{index}", prompt, 5), num_siblings=siblings)
        for index, siblings in enumerate((3, 0, 0, 0))
    ]
    window = resume_set(manifest, prompt_len).window.num_pages
    assert moved == [pages + window + (Kind.RECURRENT in manifest.kinds), 0, 0, 0]
    # One page of its own for each, if the prompt ends within one; all others stand once. The
    # frozen one is still read by steps that have not run.
    own = 4 if prompt_len % 4 else 0
    assert decode.scheduler.ledgers()[Kind.FULL].leased == prompt_len // 4 + own + bool(own)
    assert not len(decode.scheduler.allocator.prompt_ends), "the last sibling has come"
    decode.drain()
    for index in range(4):
        assert decode.tokens[f"r{index}"] == decode.expected(f"r{index}")
    assert roles(decode) <= {"tree"}


def test_a_request_alone_copies_nothing() -> None:
    pair = pair_of(ALL_KINDS)
    handed_off(pair, request(ALL_KINDS, "r0", PROMPT, 5))
    assert Role.PROMPT_END not in roles(pair[1])
    assert not any(plan.ops.copies for plan in pair[1].queued)


def test_another_prompt_on_the_same_pages_copies_nothing() -> None:
    pair = pair_of(HYBRID)
    handed_off(pair, request(HYBRID, "r0", PROMPT, 5), num_siblings=3)
    for index, other in enumerate((PROMPT[:-1], [*PROMPT[:-1], 3], [*PROMPT, 3])):
        assert handed_off(pair, request(HYBRID, f"other{index}", other, 5)) > 0
    salted = replace(request(HYBRID, "salted", PROMPT[:3], 1), tenant_salt=b"other")
    handed_off(pair, request(HYBRID, "short", PROMPT[:3], 5), num_siblings=1)
    assert handed_off(pair, salted) > 0
    pair[1].drain()


def test_an_end_goes_after_a_while() -> None:
    pair = pair_of(HYBRID)
    decode = pair[1]
    handed_off(pair, request(HYBRID, "r0", PROMPT, 5), num_siblings=3)
    decode.scheduler.reservations.expire(decode.now + KEPT_SECONDS / 2)
    assert Role.PROMPT_END in roles(decode)
    decode.scheduler.reservations.expire(decode.now + KEPT_SECONDS)
    assert Role.PROMPT_END not in roles(decode)
    assert handed_off(pair, request(HYBRID, "r1", PROMPT, 5)) > 0
    decode.drain()


def test_an_end_makes_room_where_the_tree_has_none() -> None:
    """Two rows' states and the frozen one: a third request takes the place of that one."""
    pair = pair_of(HYBRID, recurrent=3)
    decode = pair[1]
    decode.scheduler.flush()
    handed_off(pair, request(HYBRID, "r0", PROMPT, 1), num_siblings=3)
    assert Role.PROMPT_END in roles(decode)
    for index in (1, 2, 3):
        handed_off(pair, request(HYBRID, f"r{index}", [3, 4, index] * 2, 9))
    assert Role.PROMPT_END not in roles(decode)
    with pytest.raises(OutOfSlots):
        decode.scheduler.reservations.reserve("r4", request(HYBRID, "r4", PROMPT, 9), decode.now)


def test_what_finds_no_room_costs_no_end() -> None:
    pair = pair_of(HYBRID, full=12)
    decode = pair[1]
    handed_off(pair, request(HYBRID, "r0", PROMPT, 9), num_siblings=3)
    with pytest.raises(OutOfSlots):
        decode.scheduler.reservations.reserve("big", request(HYBRID, "big", [9] * 40), decode.now)
    assert Role.PROMPT_END in roles(decode)
    assert handed_off(pair, request(HYBRID, "r1", PROMPT, 9)) == 0
    decode.drain()


@pytest.mark.parametrize("prompt_len", [3, 16, 18])
def test_a_request_retracted_before_its_first_step_publishes_no_empty_slot(
    prompt_len: int,
) -> None:
    """Its window's slots are to be copied into, and hold nothing yet. Its first token may have
    filled a page all the same."""
    pair = pair_of(ATTENTION)
    decode = pair[1]
    for name, siblings in (("r0", 1), ("r1", 0)):
        handed_off(pair, request(ATTENTION, name, PROMPT[:prompt_len], 9), num_siblings=siblings)
    for name in ("r1", "r0"):
        sequence = decode.scheduler.sequences.running(name)
        decode.scheduler.retraction.retract(sequence, decode.now)
        decode.collect()  # compares all that the tree holds with what it names
    assert len(decode.seen(Retracted)) == 2
    decode.drain()
    for name in ("r0", "r1"):
        assert decode.tokens[name] == decode.expected(name)


def test_a_doubtful_request_comes_back_with_the_keys_of_all_its_pages() -> None:
    """Its first token fills the first page; it publishes nothing, and is computed again."""
    pair = pair_of(HYBRID)
    decode = pair[1]
    handed_off(pair, request(HYBRID, "r0", PROMPT[:3], 9))
    sequence = decode.scheduler.sequences.running("r0")
    sequence.is_doubtful = True
    decode.scheduler.retraction.retract(sequence, decode.now)
    decode.drain()
    assert decode.tokens["r0"] == decode.expected("r0")


def test_an_end_without_numbers_is_dropped_with_its_chain() -> None:
    for prompt in (PROMPT, PROMPT[:3]):
        pair = pair_of(HYBRID)
        decode = pair[1]
        handed_off(pair, request(HYBRID, "r0", prompt, 9), num_siblings=2)
        handed_off(pair, request(HYBRID, "r1", prompt, 9))
        decode.plan()
        step = decode.queued.popleft()
        assert isinstance(step, DecodeStep)
        outcome = decode.engine.run(step)
        spoilt = tuple(
            Sampled(NO_TOKEN, {}) if name == "r1" else drawn
            for name, drawn in zip(step.request_ids, outcome.sampled, strict=True)
        )
        decode.scheduler.commit(step, replace(outcome, sampled=spoilt), decode.now)
        decode.collect()
        (failed,) = decode.seen(RequestFailed)
        assert isinstance(failed.error, NonFiniteState), "it was computed from shared state"
        assert not len(decode.scheduler.allocator.prompt_ends)
        assert handed_off(pair, request(HYBRID, "r2", prompt, 9)) > 0


PROMPTS = st.builds(
    lambda stem, tail: [*stem, *tail],
    st.sampled_from(([1] * 9, [1] * 16, [2] * 3)),
    st.lists(st.integers(0, 2), max_size=5),
)


def check_detached(worker: WatchedWorker, name: str) -> None:
    """Its slots hold the state of all its tokens but the last, which was drawn and shown."""
    scheduler, manifest = worker.scheduler, worker.manifest
    assert not scheduler.sequences.running(name).in_flight, "a step may still write its slots"
    known = scheduler.known_tokens(name).tolist()
    prompt = worker.requests[name].token_ids.tolist()
    assert known == prompt + worker.tokens[name], "what was drawn was told"
    hashes = extended(0, known[:-1])
    num_tokens, needs = len(hashes), resume_set(manifest, len(hashes))
    spans = {Kind.FULL: needs.full, Kind.WINDOW: needs.window}
    for kind in manifest.kinds:
        slabs = worker.engine.slabs.stamps(kind)
        if kind is Kind.RECURRENT:
            ((_, state),) = scheduler.units_at(name, kind, num_tokens, num_tokens + 1)
            assert slabs[state.slot].tolist()[:2] == [hashes[-1], num_tokens]
            continue
        for page, handle in scheduler.units_at(name, kind, *spans[kind]):
            written = hashes[page * PAGE : (page + 1) * PAGE]
            assert slabs[handle.slot].tolist()[: len(written)] == written, f"{kind} page {page}"


def test_a_request_is_detached_once_no_step_may_write_its_slots() -> None:
    prefill, decode = pair_of(HYBRID)
    asked = request(HYBRID, "r1", PROMPT, 9)
    handed_off((prefill, decode), asked)
    decode.plan()
    assert decode.run_oldest()
    assert decode.plan(), "its second step is in flight"
    assert decode.scheduler.detach("r1", decode.now)
    decode.collect()
    assert decode.seen(SequenceDetached) == [], "that step may still write"
    decode.run_oldest()
    assert decode.seen(SequenceDetached) == [SequenceDetached("r1")]
    check_detached(decode, "r1")
    assert decode.scheduler.statistics().decoding == 0, "it takes part in no more steps"
    decode.scheduler.cancel("r1", decode.now)
    decode.drain()
    assert roles(decode) <= {"tree"}


class SiblingsMachine(RuleBasedStateMachine):
    """Siblings come to a small decode worker, are aborted, cancelled, retracted and detached in any
    order. Detached ones stand still, with the state of all tokens but the last, and then leave."""

    @initialize(
        model=st.sampled_from(sorted(MANIFESTS)),
        overlap=st.booleans(),
        full=st.integers(14, 24),
        recurrent=st.integers(7, 12),
        drafts=st.sampled_from([0, 0, 2]),
    )
    def start(self, model: str, overlap: bool, full: int, recurrent: int, drafts: int) -> None:
        manifest = MANIFESTS[model]
        sizes = {Kind.FULL: full, Kind.WINDOW: 26, Kind.RECURRENT: recurrent}
        self.prefill = worker_for(manifest)
        self.decode = WatchedWorker(
            manifest,
            sizes,
            overlap=overlap,
            drafting=RandomDrafts(drafts) if drafts else NO_DRAFTS,
        )
        self.count = 0
        self.reserved: list[Request] = []
        self.prompts: list[list[int]] = []
        self.unanswered: set[str] = set()
        self.detached: set[str] = set()

    @rule(prompt=PROMPTS, max_tokens=st.integers(1, 9), siblings=st.integers(1, 4))
    def first(self, prompt: list[int], max_tokens: int, siblings: int) -> None:
        self.prompts.append(prompt)
        self._reserve(prompt, max_tokens, siblings)

    @precondition(lambda self: self.prompts)
    @rule(pick=st.integers(0, 99), max_tokens=st.integers(1, 9))
    def sibling(self, pick: int, max_tokens: int) -> None:
        self._reserve(self.prompts[-1 - pick % min(3, len(self.prompts))], max_tokens, 0)

    def _reserve(self, prompt: list[int], max_tokens: int, siblings: int) -> None:
        self.count += 1
        asked = request(self.decode.manifest, f"r{self.count}", prompt, max_tokens)
        asked = replace(asked, num_siblings=siblings)
        try:
            self.decode.scheduler.reservations.reserve(asked.request_id, asked, self.decode.now)
        except OutOfSlots:
            return
        self.reserved.append(asked)
        self.decode.collect()

    @precondition(lambda self: self.reserved)
    @rule(pick=st.integers(0, 99))
    def commit(self, pick: int) -> None:
        """Writes the wanted units, as the stamps of a cold run; then the request is adopted."""
        asked = self.reserved.pop(pick % len(self.reserved))
        name, prompt = asked.request_id, asked.token_ids.tolist()
        source = f"{name} here"
        self.prefill.submit(replace(asked, request_id=source, num_siblings=0), Goal.HAND_OFF)
        self.prefill.drain()
        for kind in self.decode.manifest.kinds:
            wanted = self.decode.scheduler.reservations.units_at(name, kind, 0, len(prompt) + 1)
            for index, handle in wanted:
                ((_, there),) = self.prefill.scheduler.units_at(source, kind, index, index + 1)
                content = bytes(self.prefill.engine.transfer.read(kind, there.slot))
                self.decode.engine.transfer.write(kind, handle.slot, 0, content)
        self.prefill.scheduler.release_held(source, self.prefill.now)
        self.prefill.collect()
        self.decode.requests[name] = asked
        first = fake_tokens(as_token_ids(prompt), 1, VOCAB)[0]
        self.decode.scheduler.adopt(name, Sampled(first, {}), self.decode.now)
        self.decode.collect()

    @precondition(lambda self: self.reserved)
    @rule(pick=st.integers(0, 99))
    def abort(self, pick: int) -> None:
        asked = self.reserved.pop(pick % len(self.reserved))
        self.decode.scheduler.reservations.free(asked.request_id)
        self.decode.collect()

    @precondition(lambda self: self.decode.requests)
    @rule(pick=st.integers(0, 99))
    def cancel(self, pick: int) -> None:
        name = sorted(self.decode.requests)[pick % len(self.decode.requests)]
        if self.decode.scheduler.cancel(name, self.decode.now):
            self.unanswered.add(name)
        self.decode.collect()

    @precondition(lambda self: self.decode.scheduler.sequences.decoding)
    @rule()
    def retract(self) -> None:
        decode = self.decode
        newest = max(decode.scheduler.sequences.decoding, key=lambda one: one.order)
        decode.scheduler.retraction.retract(newest, decode.now)
        decode.collect()

    @precondition(lambda self: self.decode.scheduler.sequences.decoding)
    @rule(pick=st.integers(0, 99), num_planned=st.integers(0, 1))
    def detach(self, pick: int, num_planned: int) -> None:
        """With a step in flight, or none."""
        for _ in range(num_planned):
            self.decode.plan()
        running = sorted(one.request_id for one in self.decode.scheduler.sequences.decoding)
        name = running[pick % len(running)]
        if self.decode.scheduler.detach(name, self.decode.now):
            self.unanswered.add(name)
            self.detached.add(name)
        self.decode.collect()

    @precondition(lambda self: self.detached)
    @rule()
    def leave(self) -> None:
        """Those that stand still are sent, as they are, and give their slots back."""
        still = {event.request_id for event in self.decode.seen(SequenceDetached)} & self.detached
        for name in sorted(still):
            if name in self.decode.scheduler.sequences.by_id:  # it was not cancelled
                check_detached(self.decode, name)
                self.decode.scheduler.cancel(name, self.decode.now)
                self.decode.collect()
        self.detached -= still

    @rule(plans=st.integers(0, 2))
    def step(self, plans: int) -> None:
        for _ in range(plans):
            self.decode.plan()
        self.decode.run_oldest()

    @rule(times=st.integers(1, 12))
    def advance(self, times: int) -> None:
        for _ in range(times):
            self.step(1)

    @rule(is_late=st.booleans())
    def forget(self, is_late: bool) -> None:
        if is_late:
            self.decode.scheduler.reservations.expire(self.decode.now + KEPT_SECONDS)
        else:
            self.decode.scheduler.flush()
        self.decode.collect()

    def teardown(self) -> None:
        if not hasattr(self, "decode"):
            return
        while self.reserved:
            self.commit(0)
        self.decode.drain()
        self.leave()
        for name in set(self.decode.requests) - self.unanswered:
            assert self.decode.tokens[name] == self.decode.expected(name)
        self.decode.scheduler.reservations.expire(self.decode.now + KEPT_SECONDS)
        assert roles(self.decode) <= {"tree"}


TestSiblingsMachine = SiblingsMachine.TestCase
TestSiblingsMachine.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
