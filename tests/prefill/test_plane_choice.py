"""NIXL when it is there, gRPC until then and where it fails: no hand-off waits or fails for it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.harness.pair import (
    PATIENT_SECONDS,
    PairWorker,
    WorkerPair,
    expected,
    fake_engine,
    pair_of_workers,
    paired,
    request,
    worker,
)
from tests.planes import warnings_beside_those_of_ports
from tests.waiting import until
from tests.worker.late_agents import BrokenMaking, LateAgent, SlowMaking, late_agent_of

from ferryman.errors import ConfigError, FerrymanError, Unavailable
from ferryman.settings.workers import NixlSettings
from ferryman.wire.handoff.host_network import listening_sockets
from ferryman.wire.handoff.lent_memory import place_of
from ferryman.wire.handoff.nixl_agent import NixlAgent
from ferryman.wire.handoff.nixl_library import has_nixl
from ferryman.wire.plane_values import GrpcOnly, PlaneChoice
from ferryman.wire.v1 import decode_pb2
from ferryman.worker.handoff_transport import APART_SECONDS
from ferryman.worker.planes import AgentMaker, MakeAgent, MemorySide, NixlSide, plane_side
from ferryman_decode import nixl_receiver
from ferryman_decode.server import DecodeServicer
from ferryman_prefill.server import PrefillServicer

pytestmark = pytest.mark.skipif(not has_nixl(), reason="ferryman[nixl] is not installed")

PROMPT = [3] * 21
ROLES = ["prefill", "decode"]


@pytest.fixture
def patient_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine decode may take its time to open a strip for a writer."""
    monkeypatch.setattr(nixl_receiver, "OPEN_SECONDS", PATIENT_SECONDS)


def has_agent(side: PairWorker) -> bool:
    return bool(side.service.load().planes[0] == "nixl")


@asynccontextmanager
async def pair_of(planes: PlaneChoice, role: str, make: MakeAgent) -> AsyncIterator[WorkerPair]:
    """Two workers, of which that of `role` makes its agents so; the other one has its own."""
    makers = {"prefill": NixlAgent, "decode": NixlAgent, role: make}
    async with (
        worker("prefill", PrefillServicer, planes=planes, make_agent=makers["prefill"]) as prefill,
        worker("decode", DecodeServicer, planes=planes, make_agent=makers["decode"]) as decode,
        paired(prefill, decode) as pair,
    ):
        await until(lambda: has_agent(decode if role == "prefill" else prefill))
        yield pair


def last_path(pair: WorkerPair) -> object:
    """The data plane that carried the last hand-off."""
    return pair.prefill.facts("handed_off")[-1]["path"]


async def path_of(pair: WorkerPair, name: str) -> str:
    """How a hand-off went, which was a good one."""
    asked = request(name, [*PROMPT, *name.encode()])
    await pair.run_prefill(pair.order(asked, deadline=60.0))
    tokens, _ = await pair.read_tokens(name)
    assert tokens == expected(asked)
    return str(last_path(pair))


def reason_in(pair: WorkerPair, role: str) -> object:
    """Why the last hand-off did not go by NIXL: each side says it of itself."""
    if role == "prefill":
        return pair.prefill.facts("handed_off")[-1]["why"]
    return pair.decode.facts("reserved")[-1]["why"]


@pytest.mark.parametrize("role", ROLES)
async def test_where_no_agent_can_be_made_hand_offs_go_by_grpc_and_one_warning_says_so(
    role: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken = BrokenMaking()
    async with pair_of("nixl-unlocked-or-grpc", role, broken) as pair:
        await until(lambda: broken.num_begun > 0)
        assert [await path_of(pair, name) for name in ("r1", "r2", "r3")] == ["grpc"] * 3
        assert "NIXL_ERR_BACKEND" in str(reason_in(pair, role))
        said = warnings_beside_those_of_ports(caplog)
        assert ["NIXL_ERR_BACKEND" in each for each in said] == [True]
        assert getattr(pair, role).service.load().planes == ("grpc",)


@pytest.mark.parametrize(
    ("role", "make"), [("prefill", PrefillServicer), ("decode", DecodeServicer)]
)
async def test_a_worker_whose_nixl_is_required_and_broken_ends(role: str, make: object) -> None:
    assert callable(make)
    with pytest.RaisesGroup(ConfigError):
        async with worker(role, make, planes="nixl-unlocked", make_agent=BrokenMaking()):
            await asyncio.Event().wait()


@pytest.mark.parametrize("role", ROLES)
async def test_hand_offs_go_by_grpc_until_there_is_an_agent_and_then_by_nixl(
    role: str, patient_decode: None
) -> None:
    slow = SlowMaking()
    async with pair_of("nixl-unlocked-or-grpc", role, slow) as pair:
        try:
            await until(lambda: slow.num_begun > 0)
            assert await path_of(pair, "r1") == "grpc"
            assert "not ready" in str(reason_in(pair, role))
        finally:
            slow.go_on()
        await until(lambda: has_agent(getattr(pair, role)))
        assert await path_of(pair, "r2") == "nixl"


@pytest.mark.parametrize("role", ROLES)
async def test_where_nixl_is_required_the_first_hand_off_waits_for_the_agent(role: str) -> None:
    slow = SlowMaking()
    async with pair_of("nixl-unlocked", role, slow) as pair:
        try:
            handing_off = asyncio.create_task(path_of(pair, "r1"))
            await until(lambda: bool(pair.prefill.service._attempts))
            await until(lambda: slow.num_begun > 0)
            assert not handing_off.done()
        finally:
            slow.go_on()
        assert await handing_off == "nixl"


async def test_an_agent_that_is_made_for_nobody_any_more_is_closed() -> None:
    """Its worker ends meanwhile, and the memory that it may touch goes next."""
    slow = SlowMaking()
    with fake_engine() as engine:
        making = asyncio.create_task(AgentMaker(NixlSide(engine.places, make=slow), "one").make())
        try:
            await until(lambda: slow.num_begun > 0)
            making.cancel()
            await asyncio.sleep(0)
            assert not making.done(), "nobody lets go of the memory before"
        finally:
            slow.go_on()
        with pytest.raises(asyncio.CancelledError):
            await making
    (agent,) = slow.made
    with pytest.raises(Unavailable, match="closed"):
        await agent.notifications()


async def test_a_hand_off_that_nixl_failed_is_tried_again_by_grpc_and_nixl_again_later(
    patient_decode: None,
) -> None:
    async with pair_of_workers(planes="nixl-unlocked-or-grpc") as pair:
        late = late_agent_of(pair.prefill)
        asked = request("r1", PROMPT)
        running = asyncio.create_task(pair.run_prefill(pair.order(asked)))
        await until(lambda: late.num_waiting > 0)
        late.lose()
        with pytest.raises(FerrymanError):
            await running
        await pair.run_prefill(pair.order(asked, attempt=2))
        assert last_path(pair) == "grpc"
        assert "failed" in str(reason_in(pair, "prefill"))
        tokens, _ = await pair.read_tokens("r1", attempt=2)
        assert tokens == expected(asked)
        late.arrive()
        # The lost write has closed the writer's agent; until the next one is made gRPC is right.
        await until(lambda: pair.decode.service._nixl_receiver._spare.is_made)
        pair.prefill.clock.ahead = APART_SECONDS
        assert await path_of(pair, "r2") == "nixl"


async def test_a_connection_that_stands_still_is_ended_and_the_retry_goes_by_grpc() -> None:
    """An interface that went away says nothing, and a deadline may be minutes away."""
    async with pair_of_workers(planes="nixl-unlocked-or-grpc") as pair:
        late_agent_of(pair.prefill)
        pair.prefill.service._transport.writer._stall_seconds = 0.05
        asked = request("r1", PROMPT)
        async with asyncio.timeout(120):
            with pytest.raises(FerrymanError):
                await pair.run_prefill(pair.order(asked, deadline=600.0))
        await pair.run_prefill(pair.order(asked, attempt=2))
        assert last_path(pair) == "grpc"
        tokens, _ = await pair.read_tokens("r1", attempt=2)
        assert tokens == expected(asked)
        await until(lambda: not pair.leased())


class FarAgent(LateAgent):
    """An agent that reaches no peer."""

    num_tried = 0

    async def add_peer(self, metadata: bytes) -> str:
        self.num_tried += 1
        raise Unavailable("NIXL: NIXL_ERR_BACKEND")


@pytest.mark.parametrize("planes", ["nixl-unlocked-or-grpc", "nixl-unlocked"])
async def test_a_decode_worker_out_of_nixls_reach_is_written_by_grpc_in_the_same_attempt(
    planes: PlaneChoice, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair_of_workers(planes=planes) as pair:
        writer = pair.prefill.service._transport.writer
        writer._agent = far = FarAgent(writer._agent)
        assert [await path_of(pair, name) for name in ("r1", "r2")] == ["grpc", "grpc"]
        assert "reach" in str(pair.prefill.facts("handed_off")[0]["why"])
        assert far.num_tried == {"nixl-unlocked-or-grpc": 1, "nixl-unlocked": 2}[planes]
        said = [each for each in caplog.records if "NIXL_ERR_BACKEND" in each.getMessage()]
        assert len(said) == far.num_tried
        await until(lambda: not pair.leased())


class OddGrants(DecodeServicer):
    """Grants slots by another cut than the writer's."""

    async def Reserve(self, request: Any, context: Any) -> decode_pb2.ReserveResponse:
        answer = await super().Reserve(request, context)
        answer.nixl.layout_digest = "odd"
        return answer


async def test_a_grant_by_another_cut_is_written_by_grpc_in_the_same_attempt() -> None:
    async with pair_of_workers(OddGrants, planes="nixl-unlocked") as pair:
        assert await path_of(pair, "r1") == "grpc"
        assert reason_in(pair, "prefill") == "prefill: decode's grant does not fit"
        await until(lambda: not pair.leased())


async def test_an_attempt_ends_though_its_writes_do_not() -> None:
    """Its slots stay until they have; the router need not wait for that to try again."""
    async with pair_of_workers(planes="nixl-unlocked-or-grpc") as pair:
        late = late_agent_of(pair.prefill)
        order = pair.order(request("r1", PROMPT), deadline=600.0)
        running = asyncio.create_task(pair.run_prefill(order))
        await until(lambda: late.num_waiting > 0)
        pair.prefill.clock.ahead = 2 * PATIENT_SECONDS
        async with asyncio.timeout(120):
            with pytest.raises(FerrymanError):
                await running
        assert "transfer_out" in pair.prefill.leased()
        late.arrive()
        await until(lambda: not pair.leased())


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        ("grpc", "was told to use gRPC"),
        ("nixl", "was not told to open NIXL's unlocked ports"),
    ],
)
def test_a_worker_whose_settings_do_not_name_the_danger_has_no_agent(choice: Any, why: str) -> None:
    side = plane_side(choice, {}, ("127.0.0.1", "127.0.0.1"), NixlSettings(), {})
    assert side == GrpcOnly(why)


def test_by_default_a_worker_shares_memory_and_opens_no_port(tmp_path: Path) -> None:
    hosts = ("127.0.0.1", "127.0.0.1")
    side = plane_side("auto", {}, hosts, NixlSettings(), {}, tmp_path)
    assert side == MemorySide(tmp_path, place_of(tmp_path))
    gone = plane_side("auto", {}, hosts, NixlSettings(), {}, tmp_path / "gone")
    assert gone == GrpcOnly("its arena folder: No such file or directory")


@pytest.mark.parametrize("role", ROLES)
async def test_a_warning_names_each_port_that_an_agent_opens_without_a_lock(
    role: str, caplog: pytest.LogCaptureFixture
) -> None:
    slow = SlowMaking()
    async with pair_of("nixl-unlocked", role, slow) as pair:
        await until(lambda: slow.num_begun > 0)
        caplog.clear()
        before = listening_sockets(os.getpid())
        slow.go_on()
        await until(lambda: has_agent(getattr(pair, role)))
        (port,) = listening_sockets(os.getpid()) - before
        (warning,) = (each.getMessage() for each in caplog.records if each.levelname == "WARNING")
    assert f"listens without a lock at {port}:" in warning
    assert "can write into this worker's memory or end it" in warning
    assert "PLANES=auto" in warning
