"""A probe between two workers: bytes there and back, for a router's signature and no other."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from tests.cluster_keys import KEY, STRANGERS_KEY

from ferryman.errors import InvalidRequest, PermissionDenied, Unavailable
from ferryman.runtime.embedded import free_port
from ferryman.runtime.metrics import Metrics, refused_calls
from ferryman.security.cluster_key import ClusterKey
from ferryman.security.credentials import ClusterRole, credentials_of
from ferryman.wire.grpc.peer_probe import METHOD, PROBE_BYTES, SERVICE, PeerProbe, register_echo
from ferryman.wire.grpc.role_tokens import GrpcAccess
from ferryman.wire.grpc.rpc import Channels, channel, listening
from ferryman.wire.signed_orders import RouterSignatures, SignatureCheck

PREFILL, ROUTER = ClusterRole.PREFILL, ClusterRole.ROUTER
SENDER = "prefill-1"


def access_of(role: ClusterRole, key: ClusterKey = KEY) -> GrpcAccess:
    return GrpcAccess(credentials_of(key, role))


@asynccontextmanager
async def peer() -> AsyncIterator[str]:
    """A worker that echoes, at this address."""
    locks = access_of(ClusterRole.DECODE).locks(refused_calls(Metrics("decode")))
    async with listening("127.0.0.1:0", register_echo, grace=0.0, locks=locks) as server:
        yield f"127.0.0.1:{server.port}"


async def obeyed(address: str, signature: bytes, key: ClusterKey = KEY) -> dict[str, object]:
    """The answer of a prefill worker that has the order to move bytes to that address."""
    access = access_of(PREFILL)
    async with Channels(access_of(PREFILL, key)) as channels:
        probe = PeerProbe(channels, SignatureCheck(access, SENDER, 1).check_probe)
        order = {"address": address, "signature": signature.hex()}
        answer: dict[str, object] = json.loads(await probe.order(json.dumps(order).encode()))
        return answer


def signed(address: str, worker_id: str = SENDER, key: ClusterKey = KEY) -> bytes:
    return RouterSignatures(access_of(ROUTER, key)).probe(address, worker_id)


async def test_a_mebibyte_goes_there_and_comes_back_the_same() -> None:
    async with peer() as address:
        answer = await obeyed(address, signed(address))
    assert (answer["bytes"], answer["is_same"]) == (PROBE_BYTES, True)


async def test_only_a_router_of_the_cluster_sends_a_worker_somewhere() -> None:
    async with peer() as address:
        elsewhere = signed("192.0.2.1:1")
        for_another = signed(address, "prefill-2")
        of_strangers = signed(address, key=STRANGERS_KEY)
        for signature in (b"", elsewhere, for_another, of_strangers):
            with pytest.raises(PermissionDenied):
                await obeyed(address, signature)


async def test_a_peer_that_is_not_there_or_refuses_is_unavailable() -> None:
    nobody = f"127.0.0.1:{free_port()}"
    with pytest.raises(Unavailable, match="UNAVAILABLE"):
        await obeyed(nobody, signed(nobody))
    async with peer() as address:
        with pytest.raises(Unavailable, match="UNAUTHENTICATED"):
            await obeyed(address, signed(address), STRANGERS_KEY)


async def test_an_echo_has_an_end() -> None:
    token = credentials_of(KEY, PREFILL).grpc_token
    async with peer() as address, channel(address, token) as way:
        echo: Any = way.unary_unary(f"/{SERVICE}/{METHOD}")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await echo(bytes(PROBE_BYTES + 1))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("order", [b"", b"[]", b"{}", b'{"address": "h:1", "signature": "no hex"}'])
async def test_an_order_that_is_none_is_refused(order: bytes) -> None:
    async with Channels() as channels:
        probe = PeerProbe(channels, SignatureCheck(access_of(PREFILL), SENDER, 1).check_probe)
        with pytest.raises(InvalidRequest):
            await probe.order(order)
