"""The auditor of a worker: equal state is counted, wrong state takes unit and worker out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import torch
from tests.both.violations import violations
from tests.harness.pair import (
    WorkerPair,
    expected,
    fake_engine,
    hand_off,
    one_worker_on,
    pair_of_engines,
    pair_with,
    worker_options,
)
from tests.harness.pair import request as request_for
from tests.tiny_models import save_tiny_model
from tests.waiting import until

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.handoff import receiver as reservations
from ferryman.handoff.commit_check import Verified
from ferryman.handoff.effects import WriteFence
from ferryman.schedule.limits import IN_TURNS
from ferryman.schedule.request import SamplingParams
from ferryman.wire.codec.pieces import Piece
from ferryman.worker.host import NoHostTier
from ferryman_decode.handoff_receiver import HandoffReceiver
from ferryman_kernels.products.packed_product import reads_panels

LONG = list(range(1, 30))


@asynccontextmanager
async def audited_pair() -> AsyncIterator[WorkerPair]:
    """A pair whose decode worker audits every request."""
    with fake_engine() as for_prefill, fake_engine(audit_share=1.0) as for_decode:
        async with pair_of_engines(for_prefill, for_decode) as pair:
            yield pair


def audits(pair: WorkerPair, result: str) -> float:
    name = f"ferryman_{pair.decode.parts.role}_audits_total"
    registry = pair.decode.parts.metrics.registry
    return registry.get_sample_value(name, {"result": result}) or 0.0


async def answered(pair: WorkerPair, name: str, max_tokens: int = 6) -> None:
    asked = request_for(name, LONG, max_tokens)
    await pair.run_prefill(pair.order(asked))
    tokens, _ = await pair.read_tokens(name)
    assert tokens == expected(asked)


async def test_an_equal_audit_is_counted_and_told() -> None:
    async with audited_pair() as pair:
        await answered(pair, "r1")
        await until(lambda: audits(pair, "equal") > 0)
        (facts,) = pair.decode.facts("audited")
        assert facts == {"result": "equal", "position": 34, "reuse": ["hand_off"]}
        assert pair.decode.engine.scheduler.statistics().audited_tokens == 34
        await until(lambda: not pair.decode.leased())
        assert not pair.decode.engine.scheduler.is_quarantined


async def test_a_worker_that_does_both_audits_its_hits() -> None:
    with fake_engine(order=IN_TURNS, audit_share=1.0) as engine:
        async with one_worker_on(engine) as pair:
            await answered(pair, "r1")
            await answered(pair, "r2")
            await until(lambda: audits(pair, "equal") > 0)
            (facts,) = pair.decode.facts("audited")
            assert facts["reuse"] == ["device"]
            event = next(event for event in pair.decode.events() if event.name == "audited")
            assert (event.role, event.request_id, event.attempt) == ("decode", "r2", 1)
            assert not violations(pair, "r2")
            await until(lambda: not pair.decode.leased())


@contextmanager
def flipped_on_the_way(kind: Kind, index: int) -> Iterator[None]:
    """A hand-off with one wrong byte in one unit, and a decode worker that checks no digests."""
    struck = []
    write = HandoffReceiver.write

    def spoilt(self: HandoffReceiver, fence: WriteFence, piece: Piece) -> None:
        write(self, fence, piece)
        if (piece.unit.kind, piece.unit.index) == (kind, index) and piece.offset == 0:
            slot = self._slots[fence.reservation_id][piece.unit.name].slot
            self._engine.transfer.read(kind, slot)[3] ^= 1
            struck.append(piece.unit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HandoffReceiver, "write", spoilt)
        patch.setattr(reservations, "check_commit", lambda *_: Verified())
        yield
    assert struck, "the fault was planted"


@pytest.mark.parametrize(
    ("kind", "index"), [(Kind.FULL, 1), (Kind.WINDOW, 7), (Kind.RECURRENT, 29)]
)
async def test_wrong_state_takes_unit_and_worker_out(
    kind: Kind, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[PageKey] = []
    monkeypatch.setattr(NoHostTier, "chain_dropped", lambda _self, first: dropped.append(first))
    async with audited_pair() as pair:
        scheduler = pair.decode.engine.scheduler
        with flipped_on_the_way(kind, index):
            await answered(pair, "r1", max_tokens=1)
            await until(lambda: audits(pair, "different") > 0)
        (facts,) = pair.decode.facts("audited")
        assert facts["result"] == "different"
        assert (facts["kind"], facts["index"]) == (str(kind), index)
        assert facts["origin"] == "hand_off"
        assert facts["served"] != facts["cold"]
        keys = request_for("r1", LONG).keys
        assert dropped == [keys[0]]
        assert not scheduler.allocator.tree.match_depth(keys)
        assert scheduler.is_quarantined
        await until(lambda: not pair.decode.leased())


async def test_a_worker_in_quarantine_serves_and_reuses_nothing() -> None:
    with fake_engine(order=IN_TURNS, audit_share=1.0) as engine:
        async with one_worker_on(engine) as pair:
            await answered(pair, "r1")
            engine.scheduler.quarantine()
            await answered(pair, "r2")
            await answered(pair, "r3")
            admitted = pair.decode.facts("admitted")
            assert [facts["position"] for facts in admitted] == [0, 0, 0]
            assert [facts["uncached"] for facts in admitted[1:]] == [{"quarantined": 8}] * 2
            assert not len(engine.scheduler.allocator.tree)
            await until(lambda: not pair.decode.leased())


@pytest.mark.skipif(
    not reads_panels(torch.float32), reason="this processor's products follow the batch"
)
@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "sampled"])
async def test_a_model_s_hand_offs_hits_and_next_turns_are_equal_to_the_bit(
    temperature: float, tmp_path: Path
) -> None:
    folder = save_tiny_model(tmp_path, "gemma3")
    prefills = worker_options(folder, decodes=False).model_copy(update={"dtype": "float32"})
    changes = {"dtype": "float32", "audit_share": 1.0}
    decodes = worker_options(folder).model_copy(update=changes)
    sampling = SamplingParams(max_tokens=20, temperature=temperature, seed=4, ignore_eos=True)
    async with pair_with(prefills, decodes) as pair:
        history = [3 + 7 * i % 80 for i in range(50)]
        for turn in range(4):
            await hand_off(pair, f"r{turn}", history, sampling)
            tokens, _ = await pair.read_tokens(f"r{turn}")
            await until(lambda: not pair.decode.leased())
            history = [*history, *tokens, 5, 9, turn]
        assert audits(pair, "equal") == 4
        reuse = [facts["reuse"] for facts in pair.decode.facts("audited")]
        assert reuse == [["hand_off"], *[["device", "hand_off"]] * 3]
