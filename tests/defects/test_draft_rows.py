"""Defects of speculative decoding: rows 3, 40, 41 and 42 of the catalogue, with drafts.

Random schedules on a watched worker: requests that draft beside those that do not, right and wrong
drafts, page ends anywhere within the runs, cancellations while runs are verified. After every step
all that is cached is read against the prefix that its key names (`WatchedWorker`).
"""

from __future__ import annotations

import os
from collections import Counter
from random import Random

import pytest
import torch
from tests.engine.plans import Guest, full_pages, prefill, verify
from tests.engine.toy_model import SIZES, ToyModel
from tests.harness.schedule import (
    HYBRID,
    MANIFESTS,
    RandomDrafts,
    WatchedWorker,
    is_all_cached,
    request,
)
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.engine.forward import step
from ferryman.engine.memory.slabs import Slabs
from ferryman.engine.runner import Runner
from ferryman.model.shapes.batch import DecodeBatch
from ferryman.model.shapes.ranks import Group
from ferryman.model.shapes.state import ModelState
from ferryman.schedule.batch import DecodeStep, SlotOps, SlotSnapshot
from ferryman.schedule.drafting import ON_DEVICE, Drafting, ModelDrafts
from ferryman.schedule.events import Retracted

NUM_SCHEDULES = int(os.environ.get("FERRYMAN_TEST_DRAFT_SCHEDULES", "40"))
STEMS = ([1] * 9, [1] * 14, [2] * 11)


def a_drafting(rng: Random, seed: int) -> Drafting:
    """Short or long runs of drafts, mostly right; or a draft model that is sometimes wrong."""
    choices: list[Drafting] = [
        RandomDrafts(rng.randint(1, 4), 0.7, seed),
        RandomDrafts(rng.randint(5, 9), 0.9, seed),
        ModelDrafts(rng.randint(1, 6)),
    ]
    return rng.choice(choices)


class Play:
    """One random schedule; `counts` says what happened, so that a test can insist on it."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(f"drafts {seed}")
        manifest = MANIFESTS[rng.choice(sorted(MANIFESTS))]
        sizes = {Kind.FULL: rng.randint(14, 24), Kind.WINDOW: 30, Kind.RECURRENT: 26}
        self.worker = WatchedWorker(
            manifest,
            sizes,
            overlap=rng.random() < 0.5,
            prefix_cache=rng.random() < 0.8,
            drafting=a_drafting(rng, seed),
        )
        self.cancelled: set[str] = set()
        self.counts: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        for _ in range(self.rng.randint(5, 25)):
            self.rng.choice([self._arrive, self._advance, self._advance, self._cancel])()
        self.worker.drain()
        for name in self.worker.requests:
            tokens, expected = self.worker.tokens[name], self.worker.expected(name)
            assert tokens == (expected[: len(tokens)] if name in self.cancelled else expected)
        assert is_all_cached(self.worker)
        drafts = self.worker.scheduler.statistics().drafts
        self.counts["accepted"] += drafts.accepted
        self.counts["rejected"] += drafts.drafted - drafts.accepted
        self.counts["retracted"] += len(self.worker.seen(Retracted))
        return self.counts

    def _arrive(self) -> None:
        tail = [self.rng.randint(0, 2) for _ in range(self.rng.randint(0, 6))]
        name = f"r{len(self.worker.requests)}"
        prompt = [*self.rng.choice(STEMS), *tail]
        asked = request(self.worker.manifest, name, prompt, self.rng.randint(1, 24))
        self.worker.submit(asked)

    def _advance(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            for _ in range(self.rng.randint(1, 2)):
                self.worker.plan()
            for plan in self.worker.queued:
                self.counts["saves"] += len(plan.ops.saves)
                self.counts["verifying"] += (
                    isinstance(plan, DecodeStep) and len(plan.verify_depths) > 1
                )
            self.worker.run_oldest()
        self.worker.plan()  # so that the next event finds a step in flight

    def _cancel(self) -> None:
        """Cancels a request, mostly one that is in a step in flight."""
        flying = [n for p in self.worker.queued if isinstance(p, DecodeStep) for n in p.request_ids]
        names = flying or sorted(self.worker.requests)
        name = self.rng.choice(names) if names else ""
        if self.worker.scheduler.cancel(name, self.worker.now):
            self.cancelled.add(name)
            self.counts["cancelled under way"] += bool(flying)
        self.worker.collect()


def test_rows_40_41_42_whatever_is_cut_off_every_slot_holds_what_its_name_says() -> None:
    total: Counter[str] = Counter()
    for seed in range(NUM_SCHEDULES):
        total += Play(seed).run()
    for what in ("accepted", "rejected", "verifying", "saves", "cancelled under way", "retracted"):
        assert total[what] > NUM_SCHEDULES // 10, total


ANNA = Guest("anna", [3, 1, 4, 1, 5, 9, 2, 6, 5], row=0, working_slot=2, pages=full_pages(7, 3, 5))


class Passes:
    """A draft model that says 7, and runs as often as there are waves."""

    def __init__(self) -> None:
        self.num_passes = 0

    def named(self, batch: DecodeBatch, state: ModelState, group: Group) -> Tensor:
        self.num_passes += len(batch.waves)
        return torch.where(batch.token_ids == ON_DEVICE, 7, batch.token_ids)


def test_row_3_slot_operations_run_once_whatever_the_number_of_draft_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies: list[list[int]] = []

    def counted(slab: Tensor, src: Tensor, dst: Tensor) -> None:
        copies.append([*src.tolist(), *dst.tolist()])
        slab[dst] = slab[src]

    monkeypatch.setattr(step, "copy_slots", counted)
    model, drafter = ToyModel(), Passes()
    slabs = Slabs.allocate(model.manifest, SIZES, "cpu")
    runner = Runner(model, slabs, max_rows=2, max_len=32, drafter=drafter)
    runner.run(prefill(0, [(ANNA, 0, 9)], SlotOps(clears=(2,))))
    before = slabs.tensors[Kind.RECURRENT][2].clone()
    saves = SlotOps(saves=(SlotSnapshot(2, 6, 9),))
    verification = verify(1, ANNA, 9, [ON_DEVICE] * 2, scratch=(3, 4), ops=saves)
    outcome = runner.run(verification)
    assert (outcome.drafts, drafter.num_passes) == ((7, 7), 3)
    assert copies == [[2, 6]]
    assert torch.equal(slabs.tensors[Kind.RECURRENT][6], before)
    slabs.tensors[Kind.RECURRENT][6] = 1
    runner.run(verification)
    assert copies == [[2, 6]], "a replay finds nothing to do"


def test_row_40_a_request_that_was_freed_under_verification_gives_back_only_its_own() -> None:
    """Its step in flight still writes to slots that no other request has been given."""
    worker = WatchedWorker(
        HYBRID, {Kind.FULL: 20, Kind.RECURRENT: 12}, drafting=RandomDrafts(3, chance=1.0)
    )
    for index in range(2):
        worker.submit(request(HYBRID, f"r{index}", [index] * 5, 20))
    while not any(isinstance(plan, DecodeStep) for plan in worker.queued):
        worker.run_oldest()
        worker.plan()
    (flying,) = (plan for plan in worker.queued if isinstance(plan, DecodeStep))
    index = flying.request_ids.index("r0")
    written = {int(flying.write_slots[token]) for token in flying.tokens_of(index)}
    assert len(written) == 4
    assert worker.scheduler.cancel("r0", worker.now)
    worker.collect()
    assert not written & set(worker.pools[Kind.RECURRENT]._free), "the device may still write there"
    worker.submit(request(HYBRID, "r2", [7] * 9, 9))
    worker.drain()
    for name in ("r1", "r2"):
        assert worker.tokens[name] == worker.expected(name)
    assert is_all_cached(worker)
