"""Forged orders to the workers of a running cluster: refused, and no cache is poisoned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from uuid import uuid4

import pytest
from tests.cluster_keys import KEY, STRANGERS_KEY, token_of
from tests.harness.cluster import (
    PAGE_SIZE,
    Cluster,
    ClusterShape,
    Service,
    assert_same,
    generate,
    on_plane,
    one_process,
    running_cluster,
    save_served_model,
)
from tests.tiny_models import VOCAB_SIZE

from ferryman.cache.keys import PageKey, as_token_ids
from ferryman.client import Client
from ferryman.errors import InvalidRequest, PermissionDenied, Unauthenticated
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.schedule.request import Request, SamplingParams
from ferryman.security.credentials import ClusterRole, credentials_of
from ferryman.wire.codec.handoff import reserve_order_to_wire
from ferryman.wire.codec.prefill import prefill_order_to_wire
from ferryman.wire.grpc.role_tokens import GrpcAccess
from ferryman.wire.grpc.rpc import channel
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.signed_orders import RouterSignatures
from ferryman.wire.v1 import decode_pb2_grpc, prefill_pb2_grpc
from ferryman.wire.values import (
    AttemptSignature,
    PrefillOrder,
    RequestContext,
    ReserveOrder,
    WorkerAddress,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, logprobs=3, ignore_eos=True)
VICTIM = [(7 * i * i + 3 * i) % 120 + 3 for i in range(75)]
OTHER = [(11 * i + 5) % 120 + 3 for i in range(75)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = save_served_model(tmp_path_factory.mktemp("model"), "bamba")
    shape = ClusterShape(settings=on_plane("grpc"))
    with running_cluster(model, tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


class Forger:
    """Sends any message to the workers, with a router's and a prefill worker's tokens or others."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        router: str = token_of(ClusterRole.ROUTER),
        writer: str = token_of(ClusterRole.PREFILL),
    ) -> None:
        self._router, self._writer = router, writer
        self._router_id = f"forger-{uuid4().hex[:8]}"
        # Its orders are signed, whatever its token: these tests forge the rest.
        self._signatures = RouterSignatures(GrpcAccess(credentials_of(KEY, ClusterRole.ROUTER)))
        (self.prefill,), (self.decode,) = cluster.of_role("prefill"), cluster.of_role("decode")
        self._digest = load_model(
            cluster.model, LoadOptions("float64", page_size=PAGE_SIZE)
        ).manifest.digest

    def _request(self, tokens: Sequence[int], keys: Sequence[PageKey]) -> Request:
        name = f"forged-{uuid4().hex[:8]}"
        return Request(name, as_token_ids(tokens), tuple(keys), GREEDY)

    def _order(self, request: Request) -> PrefillOrder:
        return PrefillOrder(
            context=RequestContext(request.request_id, 1, 20.0),
            worker_epoch=int(self.prefill.ready["epoch"]),
            decode=_address(self.decode),
            router_id=self._router_id,
            request=request,
            manifest_digest=self._digest,
        )

    async def prefills(self, tokens: Sequence[int], keys: Sequence[PageKey]) -> None:
        """Runs an order to its end: without a refusal, both workers have cached the prompt."""
        order = self._order(self._request(tokens, keys))
        async with channel(str(self.prefill.ready["address"]), self._router) as way:
            stub = prefill_pb2_grpc.PrefillServiceStub(way)
            with typed_errors():
                signed = self._signatures.attempt(order, _address(self.prefill), is_move=False)
                async for _ in stub.Prefill(prefill_order_to_wire(signed), timeout=120):
                    pass

    async def reserves(self, tokens: Sequence[int], keys: Sequence[PageKey]) -> None:
        request = self._request(tokens, keys)
        order = ReserveOrder(
            context=RequestContext(request.request_id, 1, 20.0),
            worker_epoch=int(self.decode.ready["epoch"]),
            writer=_address(self.prefill),
            router_id=self._router_id,
            request=request,
            manifest_digest=self._digest,
            manifest_json="",
            signature=self._signed(request),
        )
        async with channel(str(self.decode.ready["address"]), self._writer) as way:
            stub = decode_pb2_grpc.DecodeServiceStub(way)
            with typed_errors():
                await stub.Reserve(reserve_order_to_wire(order), timeout=120)

    def _signed(self, request: Request) -> AttemptSignature:
        order = self._order(request)
        return self._signatures.attempt(order, _address(self.prefill), is_move=False).signature


def _address(worker: Service) -> WorkerAddress:
    ready = worker.ready
    return WorkerAddress(str(ready["worker_id"]), str(ready["address"]), int(ready["epoch"]))


async def test_the_tokens_of_one_text_under_the_keys_of_another_poison_no_cache(
    cluster: Cluster,
) -> None:
    forger, keys = Forger(cluster), cluster.keys_of(VICTIM)
    with pytest.raises(InvalidRequest, match="page key"):
        await forger.prefills(OTHER, keys)
    with pytest.raises(InvalidRequest, match="page key"):
        await forger.reserves(OTHER, keys)
    with one_process(cluster.model) as llm:
        (expected,) = llm.generate([VICTIM], GREEDY)
    async with Client(cluster.grpc) as client:
        found = await generate(client, VICTIM, GREEDY)
    assert_same(found, expected)
    assert found.usage is not None
    assert found.usage.cached.total == 0, "nobody has asked this before"
    cluster.assert_ledgers_balance()


@pytest.mark.parametrize("num_keys", [0, 1, 3])
async def test_too_few_keys_end_no_worker(cluster: Cluster, num_keys: int) -> None:
    forger = Forger(cluster)
    prompt = [num_keys + 40, *OTHER]
    keys = cluster.keys_of(prompt)
    with pytest.raises(InvalidRequest, match="page keys"):
        await forger.prefills(prompt, keys[:num_keys])
    with pytest.raises(InvalidRequest, match="page keys"):
        await forger.reserves(prompt, keys[:num_keys])
    await forger.prefills(prompt, keys)
    assert [forger.prefill.process.poll(), forger.decode.process.poll()] == [None, None]


async def test_decode_refuses_tokens_that_the_model_does_not_know(cluster: Cluster) -> None:
    prompt = [*OTHER[:20], VOCAB_SIZE]
    with pytest.raises(InvalidRequest, match="vocabulary"):
        await Forger(cluster).reserves(prompt, cluster.keys_of(prompt))


@pytest.mark.parametrize(
    "token", ["", token_of(ClusterRole.ROUTER, STRANGERS_KEY), token_of(ClusterRole.PREFILL) + "0"]
)
async def test_a_stranger_gives_no_orders_and_is_counted(cluster: Cluster, token: str) -> None:
    stranger, keys = Forger(cluster, router=token, writer=token), cluster.keys_of(OTHER)
    counted = [_num_refused(worker) for worker in (stranger.prefill, stranger.decode)]
    with pytest.raises(Unauthenticated, match="no token of this cluster"):
        await stranger.prefills(OTHER, keys)
    with pytest.raises(Unauthenticated, match="no token of this cluster"):
        await stranger.reserves(OTHER, keys)
    now = [_num_refused(worker) for worker in (stranger.prefill, stranger.decode)]
    assert now == [number + 1 for number in counted]


async def test_a_role_gives_no_orders_of_another(cluster: Cluster) -> None:
    swapped = Forger(
        cluster, router=token_of(ClusterRole.DECODE), writer=token_of(ClusterRole.ROUTER)
    )
    with pytest.raises(PermissionDenied, match=r"role decode may not call .*/Prefill"):
        await swapped.prefills(OTHER, cluster.keys_of(OTHER))
    with pytest.raises(PermissionDenied, match=r"role router may not call .*/Reserve"):
        await swapped.reserves(OTHER, cluster.keys_of(OTHER))


def _num_refused(worker: Service) -> float:
    """The refused calls of strangers, over all methods."""
    lines = worker.metrics().splitlines()
    counts = (line.rsplit(" ", 1) for line in lines if "_refused_calls_total{" in line)
    return sum(float(number) for name, number in counts if 'reason="Unauthenticated"' in name)


def test_every_service_shows_how_often_the_broker_refused_it(cluster: Cluster) -> None:
    for role in ("prefill", "decode", "hostcache"):
        (service,) = cluster.of_role(role)
        text = service.metrics()
        assert f"ferryman_{role}_bus_forbidden 0.0" in text
        assert f"ferryman_{role}_bus_sent " in text
    (router,) = cluster.of_role("router")
    assert "ferryman_router_bus_forbidden 0.0" in router.metrics()
