"""Attempts that somebody makes up who has the file of a worker's role, and no process.

Each attack does what a hand-off does: slots are reserved, zeros written with their right digests,
and the whole is committed, in the name of a request of somebody else. No answer is changed by it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
import xxhash
from tests.harness.cluster import API_KEY, up
from tests.system.attacked_cluster import ANSWER, PROMPT, AttackedCluster, look_at

from ferryman.cache.keys import as_token_ids, page_keys, root_key
from ferryman.cache.manifest import Kind
from ferryman.client import Client
from ferryman.errors import PermissionDenied
from ferryman.handoff.values import Reservation, ranges_of
from ferryman.ids import make_life_secret, worker_id_of
from ferryman.llm import LLM
from ferryman.schedule.batch import Sampled
from ferryman.schedule.request import Request, SamplingParams
from ferryman.security.credentials import ClusterRole
from ferryman.wire.codec.handoff import (
    commit_order_to_wire,
    reserve_answer_from_wire,
    reserve_order_to_wire,
)
from ferryman.wire.codec.scalars import kind_to_wire
from ferryman.wire.grpc.rpc import channel
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.handoff.grpc_plane import send_units
from ferryman.wire.handoff.outgoing_units import OutgoingUnit
from ferryman.wire.public import TokenChunk
from ferryman.wire.v1 import hostcache_pb2, types_pb2
from ferryman.wire.v1.decode_pb2_grpc import DecodeServiceStub
from ferryman.wire.v1.hostcache_pb2_grpc import HostCacheServiceStub
from ferryman.wire.values import (
    AttemptSignature,
    CommitOrder,
    RequestContext,
    ReserveOrder,
    Usage,
    WorkerAddress,
)
from ferryman_launcher.options import demo_model

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

RESERVE = "/ferryman.wire.v1.DecodeService/Reserve"
WORKERS = [ClusterRole.PREFILL, ClusterRole.DECODE]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
NEXT = tuple((7 * i * i + 3 * i) % 120 + 3 for i in range(75))  # of somebody who has yet to ask
CHOSEN = 9  # a token of the attacker's choice


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedCluster]:
    """Without API keys: then the page keys of a text can be computed by all, and clients name their
    requests."""
    with up(tmp_path_factory.mktemp("up")) as running:
        yield asyncio.run(look_at(running))


@dataclass(frozen=True)
class Thief:
    """Somebody with the file of a worker's role, who knows all that can be known of the cluster."""

    cluster: AttackedCluster
    role: ClusterRole

    def wish(self, request_id: str, tokens: tuple[int, ...], attempt: int) -> ReserveOrder:
        """A hand-off of these tokens to decode, as if by the prefill worker of the cluster."""
        decode, prefill = (self.cluster.beats[role] for role in ("decode", "prefill"))
        ids = as_token_ids(tokens)
        keys = page_keys(root_key(decode.state), ids, decode.state.page_size)
        return ReserveOrder(
            context=RequestContext(request_id, attempt, 60.0),
            worker_epoch=decode.epoch,
            writer=WorkerAddress(prefill.worker_id, prefill.address, prefill.epoch),
            router_id=self.cluster.router_id,
            request=Request(request_id, ids, keys, GREEDY),
            manifest_digest=decode.state.digest,
            manifest_json="",
        )

    async def hands_off(self, wish: ReserveOrder) -> None:
        """Raises decode's refusal."""
        async with self._decode() as stub:
            with typed_errors():
                said = await stub.Reserve(reserve_order_to_wire(wish))
                answer = reserve_answer_from_wire(said, wish.context.attempt)
                request_id, digest = wish.context.request_id, wish.manifest_digest
                zeros = self._zeros(answer.reservation)
                sent = await send_units(stub, answer.reservation, request_id, digest, zeros)
                order = CommitOrder(
                    wish.context,
                    answer.reservation.reservation_id,
                    answer.reservation.epoch,
                    ranges_of(digest.name for digest in sent.digests),
                    sent.digests,
                    Sampled(CHOSEN, {}),
                    Usage(len(wish.request.token_ids)),
                )
                await stub.Commit(commit_order_to_wire(order))

    async def stores_zeros(self, tokens: tuple[int, ...]) -> None:
        """All state of a prompt's full pages, in the host-cache. Raises its refusal."""
        there, state = self.cluster.beats["hostcache"], self.cluster.beats["decode"].state
        keys = page_keys(root_key(state), as_token_ids(tokens), state.page_size)
        units = [
            types_pb2.PageRange(kind=kind_to_wire(kind), first_page=first, end_page=len(keys))
            for kind, first in ((Kind.FULL, 0), (Kind.RECURRENT, len(keys) - 1))
        ]
        token = self.cluster.leaked(self.role).grpc_token
        async with channel(there.address, token) as way:
            stub, lease = HostCacheServiceStub(way), f"thief-{self.role}"
            with typed_errors():
                reserved = await stub.Reserve(
                    hostcache_pb2.HostCacheServiceReserveRequest(
                        epoch=there.epoch,
                        worker_id=self.cluster.beats["prefill"].worker_id,
                        page_keys=b"".join(keys),
                        units=units,
                        lease_id=lease,
                    )
                )
                digests = [
                    types_pb2.UnitDigest(
                        kind=unit.kind,
                        page_index=unit.page_index,
                        digest=xxhash.xxh3_128_digest(bytes(unit.num_bytes)),
                    )
                    for unit in reserved.units
                ]
                stored = await stub.Commit(
                    hostcache_pb2.HostCacheServiceCommitRequest(
                        epoch=there.epoch, lease_id=lease, digests=digests
                    )
                )
        assert stored.stored == len(keys) + 1

    @asynccontextmanager
    async def _decode(self) -> AsyncIterator[DecodeServiceStub]:
        token = self.cluster.leaked(self.role).grpc_token
        async with channel(self.cluster.beats["decode"].address, token) as way:
            yield DecodeServiceStub(way)

    async def _zeros(self, reservation: Reservation) -> AsyncIterator[list[OutgoingUnit]]:
        beat = self.cluster.beats["decode"]
        sizes = {Kind.FULL: beat.page_bytes, Kind.RECURRENT: beat.snapshot_bytes}
        yield [
            OutgoingUnit(unit, memoryview(bytes(sizes[unit.kind]))) for unit in reservation.wanted
        ]


@pytest.fixture(params=WORKERS)
def thief(cluster: AttackedCluster, request: pytest.FixtureRequest) -> Thief:
    return Thief(cluster, request.param)


async def refused(cluster: AttackedCluster, thief: Thief, wish: ReserveOrder) -> None:
    before = denied(cluster)
    with pytest.raises(PermissionDenied, match="signed"):
        await thief.hands_off(wish)
    assert denied(cluster) == before + 1


def denied(cluster: AttackedCluster) -> float:
    labels = rf'\{{method="{RESERVE}",reason="PermissionDenied"\}}'
    return cluster.metric("decode", f"refused_calls_total{labels}")


async def test_zeros_are_put_under_no_page_of_anybodys_prompt(
    cluster: AttackedCluster, thief: Thief
) -> None:
    tokens = (*NEXT, WORKERS.index(thief.role) + 3)
    with LLM(demo_model(), dtype="float32", page_size=16, memory_bytes=1 << 26) as llm:
        (expected,) = llm.generate([tokens], GREEDY)
    with pytest.raises(PermissionDenied):
        await thief.hands_off(thief.wish(f"zeros-{thief.role}", tokens, 1))
    async with Client(cluster.up.said["grpc"], api_key=API_KEY) as client:
        events = [each async for each in client.generate(tokens, GREEDY)]
    found = [t for each in events if isinstance(each, TokenChunk) for t in each.token_ids]
    assert tuple(found) == expected.token_ids


LATER = {
    "as its router": lambda wish: wish,
    "as one that took it over": lambda wish: replace(
        wish,
        router_id=worker_id_of("router", make_life_secret()),
        context=replace(wish.context, taken_from=wish.router_id),
    ),
    "with a signature of nobody": lambda wish: replace(
        wish, signature=AttemptSignature(1, 60_000, 64 * b"\1")
    ),
}


@pytest.mark.parametrize("as_whom", LATER)
async def test_a_running_answer_is_ended_by_no_later_attempt(
    cluster: AttackedCluster, thief: Thief, as_whom: str
) -> None:
    change: Callable[[ReserveOrder], ReserveOrder] = LATER[as_whom]
    async with cluster.stream_beside() as request_id:
        await refused(cluster, thief, change(thief.wish(request_id, NEXT, 9)))


async def test_an_answer_is_given_in_nobodys_place(cluster: AttackedCluster, thief: Thief) -> None:
    """The client names his request; the thief hands it off first, with tokens of his choice."""
    request_id = f"named-{thief.role}"
    with pytest.raises(PermissionDenied):
        await thief.hands_off(thief.wish(request_id, (CHOSEN,) * 40, 1))
    async with Client(cluster.up.said["grpc"], api_key=API_KEY) as client:
        said = [each async for each in client.generate(PROMPT, ANSWER, request_id=request_id)]
    found = [t for each in said if isinstance(each, TokenChunk) for t in each.token_ids]
    assert tuple(found) == cluster.expected


async def test_zeros_are_put_under_no_page_in_the_host_cache(
    cluster: AttackedCluster, thief: Thief
) -> None:
    """In the name of a worker that maps it: new room there is zeros, whose digest he knows."""
    tokens = (20 + WORKERS.index(thief.role), *NEXT)
    with LLM(demo_model(), dtype="float32", page_size=16, memory_bytes=1 << 26) as llm:
        (expected,) = llm.generate([tokens], GREEDY)
    with pytest.raises(PermissionDenied, match="does not map the arena"):
        await thief.stores_zeros(tokens)
    async with Client(cluster.up.said["grpc"], api_key=API_KEY) as client:
        events = [each async for each in client.generate(tokens, GREEDY)]
    found = [t for each in events if isinstance(each, TokenChunk) for t in each.token_ids]
    assert tuple(found) == expected.token_ids
