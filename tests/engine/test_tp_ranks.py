"""A step of several ranks: sent after its loads, complete when the last rank has replied."""

from __future__ import annotations

from concurrent.futures import Future
from typing import cast

import pytest
from tests.engine.plans import Guest, full_pages, load, prefill
from tests.engine.toy_model import toy_runner

from ferryman.cache.manifest import Kind
from ferryman.engine.forward.packed_step import PackedStep
from ferryman.engine.memory.copy_stream import CopyFence, HostSide
from ferryman.engine.memory.slabs import Slabs
from ferryman.engine.memory.transfer import Transfer, digest_of, transfer_of
from ferryman.engine.tensor_parallel.group import TpGroup
from ferryman.engine.tensor_parallel.rendezvous import RankLost
from ferryman.model.shapes.ranks import SINGLE_RANK
from ferryman.schedule.batch import SlotOps

ANNA = Guest("anna", [3, 1, 4, 1, 5], row=0, working_slot=2, pages=full_pages(7, 3))


class Promise:
    """A step that was sent; the test decides when it is answered."""

    def __init__(self) -> None:
        self.answer: Future[None] = Future()

    def has_reply(self) -> bool:
        return self.answer.done()

    def wait(self) -> None:
        self.answer.result(60)


class OneOther:
    """Keeps the steps it was sent, and the content of slot 7 at each."""

    group = SINGLE_RANK

    def __init__(self) -> None:
        self.told: list[Promise] = []
        self.held: list[bytes] = []

    def send(self, packed: PackedStep, fence: CopyFence) -> Promise:
        fence.finish()
        self.held.append(bytes(self._transfer.read(Kind.FULL, 7)))
        self.told.append(Promise())
        return self.told[-1]

    def transfer_of(self, own: Slabs) -> Transfer:
        self._transfer = transfer_of(own, HostSide(), HostSide())
        return self._transfer


def test_a_step_is_over_when_the_other_rank_has_run_it() -> None:
    other = OneOther()
    launched = toy_runner(ranks=cast(TpGroup, other)).launch(
        prefill(0, [(ANNA, 0, 5)], SlotOps(clears=(2,)))
    )
    (told,) = other.told
    assert not launched.is_ready(), "its state is not all there, whatever rank 0 has drawn"
    told.answer.set_result(None)
    assert launched.is_ready()
    assert len(launched.outcome().sampled) == 1


def test_a_step_whose_other_rank_is_lost_fails_at_once() -> None:
    other = OneOther()
    launched = toy_runner(ranks=cast(TpGroup, other)).launch(
        prefill(0, [(ANNA, 0, 5)], SlotOps(clears=(2,)))
    )
    other.told[0].answer.set_exception(RankLost("rank 1 ended"))
    assert launched.is_ready(), "waiting would not help"
    with pytest.raises(RankLost, match="rank 1 ended"):
        launched.outcome()


def test_a_step_is_told_when_its_loads_are_there() -> None:
    other = OneOther()
    runner = toy_runner(ranks=cast(TpGroup, other))
    content = bytes(range(64)) * (len(runner.transfer.read(Kind.FULL, 0)) // 64)
    runner.host_tier.attach(memoryview(content))
    loads = (load(ANNA, Kind.FULL, 7, 0, content, digest_of(content)),)
    runner.launch(prefill(0, [(ANNA, 4, 5)], SlotOps(loads=loads, clears=(2,))))
    assert other.held == [content]
