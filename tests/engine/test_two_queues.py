"""Two queues with delays: what is copied to the host is what the last writer wrote."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doubles.fake_engine import FakeEngine
from tests.doubles.stamps import extended, fake_manifest, fake_tokens
from tests.engine.plans import Guest, decode, full_pages, prefill

from ferryman.cache.manifest import Kind
from ferryman.engine.stream import ForwardStream
from ferryman.schedule.batch import SlotOps, StepOutcome, StepPlan

PAGE = 4
SLOT_BYTES = 64
ANNA = Guest("anna", [3, 1, 4, 1, 5, 9], row=0, working_slot=2, pages=full_pages(7, 3, 5, 6))
NUM_STEPS = 10


class Backups:
    """A forward queue whose steps wait for their gates, and a queue that copies pages out."""

    def __init__(self) -> None:
        self.gates = [threading.Event() for _ in range(NUM_STEPS)]
        sizes = {Kind.FULL: 8, Kind.RECURRENT: 6}
        manifest = fake_manifest(PAGE)
        self.engine = FakeEngine(manifest, sizes, max_rows=1, max_len=32, pace=self._wait)
        self.forward = ForwardStream(self.engine)
        self.copies = ForwardStream(self.engine)

    def _wait(self, plan: StepPlan) -> None:
        assert self.gates[plan.step_id].wait(60)

    def submit_all(self) -> list[Future[StepOutcome]]:
        """The prompt, then decode from position 6 on."""
        first = self.forward.submit(prefill(0, [(ANNA, 0, 6)], SlotOps(clears=(2,))))
        rest = [self.forward.submit(decode(k, [(ANNA, 5 + k)])) for k in range(1, NUM_STEPS)]
        return [first, *rest]

    def store(self, page: int, fence: Callable[[], object]) -> Future[bytes]:
        def copy() -> bytes:
            fence()
            arena = bytearray(SLOT_BYTES)
            self.engine.transfer.store_unit(
                Kind.FULL, ANNA.pages[Kind.FULL][page], memoryview(arena)
            )
            return bytes(arena)

        return self.copies.call(copy)

    def close(self) -> None:
        self.forward.close()
        self.copies.close()


def expected(page: int) -> bytes:
    tokens = [*ANNA.tokens, *fake_tokens(ANNA.tokens, NUM_STEPS, 1000)]
    stamps = extended(0, tokens)[page * PAGE : (page + 1) * PAGE]
    return b"".join(stamp.to_bytes(8, "little") for stamp in stamps)


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(NUM_STEPS)))
def test_a_copy_that_waits_for_the_last_writer_is_whole(order: list[int]) -> None:
    """Defect 47, and 1."""
    backups = Backups()
    steps = backups.submit_all()
    # Page i is full when the token at position 4i + 3 was consumed, by step 4i - 2 or the first.
    stored = [backups.store(page, steps[max(0, 4 * page - 2)].result) for page in range(3)]
    for step_id in order:
        backups.gates[step_id].set()
    backups.close()
    for page, content in enumerate(stored):
        assert content.result(0)[: PAGE * 8] == expected(page)


def test_a_copy_without_a_fence_is_seen_to_be_wrong() -> None:
    backups = Backups()
    backups.submit_all()
    torn = backups.store(1, lambda: None).result(60)
    for gate in backups.gates:
        gate.set()
    backups.close()
    assert torn[: PAGE * 8] != expected(1)
    assert bytes(backups.engine.transfer.read(Kind.FULL, 3))[: PAGE * 8] == expected(1)
