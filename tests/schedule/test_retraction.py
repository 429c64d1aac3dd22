"""A retracted request leaves its resume set behind, and takes it up again from the host."""

from __future__ import annotations

import pytest
from tests.harness.schedule import HYBRID, MANIFESTS, ScheduledWorker, request

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.resume import HostView, resume_set
from ferryman.cache.units import HostUnit
from ferryman.engine.memory.transfer import digest_of
from ferryman.schedule.events import Cached, Retracted, SequenceAdmitted

PAGE = 4
SCARCE = {Kind.FULL: 9, Kind.WINDOW: 40, Kind.RECURRENT: 24}


class WrittenThrough:
    """Copies every cached unit to an arena as soon as its event arrives."""

    def __init__(self, worker: ScheduledWorker) -> None:
        self.worker = worker
        self.arena = bytearray()
        self.units: dict[tuple[Kind, PageKey], HostUnit] = {}
        self._heard = 0

    def listen(self) -> None:
        for event in self.worker.events[self._heard :]:
            for unit in event.units if isinstance(event, Cached) else ():
                content = bytes(self.worker.engine.transfer.read(unit.kind, unit.handle.slot))
                place = len(self.arena), len(content), digest_of(content)
                self.units[unit.kind, unit.key] = HostUnit(
                    unit.kind, unit.page_index, unit.key, *place
                )
                self.arena += content
        self._heard = len(self.worker.events)
        self.worker.engine.host_tier.attach(memoryview(bytes(self.arena)))

    def view(self, keys: tuple[PageKey, ...]) -> HostView:
        return HostView(
            {
                (kind, page): self.units[kind, key]
                for page, key in enumerate(keys)
                for kind in Kind
                if (kind, key) in self.units
            }
        )


def run_until_retracted(worker: ScheduledWorker, stored: WrittenThrough, overlap: bool) -> str:
    """Runs three requests that cannot all grow; returns the first that was retracted."""
    for index in range(3):
        worker.submit(request(worker.manifest, f"r{index}", [index] * (5 + index), 18))
    for _ in range(200):
        for _ in range(1 + overlap):
            worker.plan()
        worker.run_oldest()
        stored.listen()
        if worker.seen(Retracted):
            return worker.seen(Retracted)[0].request_id
    raise AssertionError("the pools were meant to run out")


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one step at a time"])
@pytest.mark.parametrize("name", sorted(MANIFESTS))
def test_what_a_retraction_stores_resumes_within_the_last_page(name: str, overlap: bool) -> None:
    worker = ScheduledWorker(MANIFESTS[name], SCARCE, overlap=overlap)
    stored = WrittenThrough(worker)
    retracted = run_until_retracted(worker, stored, overlap)
    asked = worker.requests[retracted]
    known = request(worker.manifest, "", [*asked.token_ids.tolist(), *worker.tokens[retracted]])
    last = (known.prompt_len - 1) // PAGE
    needs = resume_set(worker.manifest, last * PAGE)
    wanted = [(Kind.WINDOW, page) for page in range(needs.window.first, needs.window.end)]
    wanted += [(Kind.FULL, page) for page in range(needs.full.first, needs.full.end)]
    wanted += [(Kind.RECURRENT, last - 1)] if needs.needs_snapshot else []
    view = stored.view(known.keys)
    assert [name for name in wanted if name not in view.units] == []

    assert worker.scheduler.offer_host(retracted, view)
    worker.scheduler.flush()
    worker.drain()
    (plan,) = [
        event.plan
        for event in worker.seen(SequenceAdmitted)
        if event.request_id == retracted and event.is_resumed
    ][:1]
    assert plan.position >= last * PAGE, "less than a page is computed again"
    for request_id in worker.requests:
        assert worker.tokens[request_id] == worker.expected(request_id)


def test_a_request_that_waits_no_longer_is_not_offered_anything() -> None:
    worker = ScheduledWorker(HYBRID, {Kind.FULL: 20, Kind.RECURRENT: 9})
    assert not worker.scheduler.offer_host("nobody", HostView())
    worker.submit(request(worker.manifest, "r0", [1] * 9))
    assert worker.scheduler.offer_host("r0", HostView())
    worker.plan()
    assert not worker.scheduler.offer_host("r0", HostView())
