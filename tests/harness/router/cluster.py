"""A router with fake workers behind it, all in one loop, over the real broker and real gRPC."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
from tests.cluster_keys import key_file_in
from tests.harness.router.fake_decode import FakeDecode
from tests.harness.router.fake_prefill import FakePrefill
from tests.harness.router.fake_worker import FakeRouterWorker, living
from tests.harness.router.ledger import RouterLedger
from tests.text.folders import write_folder
from tests.waiting import until

from ferryman.errors import Unavailable
from ferryman.ids import make_epoch
from ferryman.settings.groups import BusSettings, IndexSettings, ListenSettings
from ferryman.settings.router import LimitSettings, RouterSettings
from ferryman.wire.grpc.rpc import channel
from ferryman.wire.nats.bus import Bus, RecordedMessage
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.nats_bus import nats_bus
from ferryman.wire.nats.subjects import Subjects
from ferryman.wire.v1.inference_pb2_grpc import InferenceServiceStub
from ferryman_router.request.request_runner import RequestRunner
from ferryman_router.routing.fleet import Fleet
from ferryman_router.service import RunningRouter, running

SENTENCE = "the ferry carries state across the river and back again. "
MAX_LEN = 600
# Its workers die by their connections; a silent one lives, however slow this machine is.
QUICK = LimitSettings(
    no_worker_seconds=0.3,
    beat_timeout_seconds=30.0,
    stream_patience_seconds=0.3,
    linger_seconds=0.2,
)


@dataclass
class RouterCluster:
    """A router, its workers, and clients of it."""

    router: RunningRouter
    bus: Bus
    subjects: Subjects
    prefills: list[FakePrefill]
    decodes: list[FakeDecode]
    http: httpx.AsyncClient
    stub: Any
    script: tuple[int, ...]
    settings: RouterSettings

    @property
    def fleet(self) -> Fleet:
        return self.router.components.fleet

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def complete(self, prompt: Any = "the ferry", **more: Any) -> httpx.Response:
        return await self.post("/v1/completions", prompt=prompt, **more)

    def request(self, request_id: str) -> RequestRunner:
        """A request that is under way, or ended lately."""
        found = self.router.components.frontend.requests.find(request_id)
        assert found is not None, f"{request_id} is known here"
        return found

    def expected(self, num_tokens: int) -> str:
        """The text of the first tokens of the script."""
        ids = [self.script[i % len(self.script)] for i in range(num_tokens)]
        return self.router.components.frontend.ctx.model.tokenizer.decode(ids)

    async def until_joined(self, *workers: FakeRouterWorker) -> None:
        """Waits until the router believes in these workers."""
        joining = {worker.worker_id for worker in workers}
        await until(lambda: joining <= {one.beat.worker_id for one in self.fleet})

    async def until_node(self, node: str) -> None:
        """Waits until a worker says that it is attached to this node."""
        await until(lambda: node in {one.beat.node for one in self.fleet})

    async def until_broker_away(self) -> None:
        """Waits until the router says that the broker is away."""
        async with asyncio.timeout(120):
            while (await self.http.get("/ready")).json()["broker"]:
                pass

    async def until_queued(self, num_waiting: int) -> None:
        """Waits until so many requests wait for a worker."""
        await until(lambda: len(self.router.components.dispatcher) == num_waiting)

    async def until_free(self) -> None:
        """Waits until no request is under way."""
        await until(lambda: not len(self.router.components.frontend.requests))

    async def life_of(self, request_id: str) -> list[str]:
        """The router's events of a request, in order, once its end was recorded."""
        ends = {"finished", "failed", "cancelled", "rejected"}
        async with asyncio.timeout(120):
            names: list[str] = []
            while not ends & set(names):
                found = await self.recorded(self.subjects.all_life_of(request_id))
                names = [json.loads(one.payload)["event"] for one in found]
        return names

    async def recorded(self, pattern: str) -> tuple[RecordedMessage, ...]:
        """The first events in the log; a broker that a busy machine holds up is asked again."""
        async with asyncio.timeout(120):
            while True:
                with suppress(Unavailable):
                    return await self.bus.history(pattern, max_events=100)
                await asyncio.sleep(0.01)


def no_order() -> None:
    """For routers that nobody orders to end."""


def model_folder(folder: Path) -> Path:
    """A folder with a tokenizer and a config; the router needs no weights."""
    write_folder(folder)
    config = {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "vocab_size": 400,
        "max_position_embeddings": MAX_LEN,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@asynccontextmanager
async def cluster(
    nats_url: str,
    folder: Path,
    *,
    num_prefills: int = 1,
    num_decodes: int = 1,
    limits: LimitSettings = QUICK,
    api_keys: str = "",
    api_keys_file: str = "",
    cors_origin: str = "",
    redis_url: str = "redis://127.0.0.1:1/0",
    lookup_seconds: float = 10.0,
    lora: str = "",
    strict_fields: bool = False,
    verbatim_prompts: bool = False,
    web_page: bool = True,
) -> AsyncIterator[RouterCluster]:
    """Everything up, every worker known to the router; each cluster has subjects of its own."""
    subjects = Subjects(f"test{make_epoch() % 10**9}")
    settings = RouterSettings(
        model=folder,
        cluster_key_file=key_file_in(folder),
        served_name="tiny",
        lora=lora,
        http=ListenSettings(),
        grpc=ListenSettings(),
        bus=BusSettings(url=nats_url, cluster=subjects.cluster),
        index=IndexSettings(url=redis_url, lookup_seconds=lookup_seconds),
        limits=limits,
        cors_origin=cors_origin,
        strict_fields=strict_fields,
        verbatim_prompts=verbatim_prompts,
        web_page=web_page,
        api_keys=api_keys,  # type: ignore[arg-type]
        api_keys_file=api_keys_file,
    )
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(nats_bus(NatsOptions(nats_url)))
        router = await stack.enter_async_context(running(settings, no_order))
        tokenizer = router.components.frontend.ctx.model.tokenizer
        script = tuple(tokenizer.encode(SENTENCE).tolist())
        prefills = [FakePrefill(script) for _ in range(num_prefills)]
        decodes = [FakeDecode(script) for _ in range(num_decodes)]
        for worker in (*prefills, *decodes):
            await stack.enter_async_context(living(worker, bus, subjects))
        base = f"http://127.0.0.1:{router.http_port}"
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=base, timeout=120))
        to_router = await stack.enter_async_context(channel(f"127.0.0.1:{router.grpc_port}"))
        made = RouterCluster(
            router,
            bus,
            subjects,
            prefills,
            decodes,
            http,
            InferenceServiceStub(to_router),
            script,
            settings,
        )
        await made.until_joined(*prefills, *decodes)
        yield made
        await RouterLedger(router.components).settle((*prefills, *decodes))


@asynccontextmanager
async def another_router(made: RouterCluster) -> AsyncIterator[Any]:
    """A stub of a second router of the cluster. It has not heard of all workers yet, and has the
    patience to."""
    limits = made.settings.limits.model_copy(update={"no_worker_seconds": 60.0})
    async with running(made.settings.model_copy(update={"limits": limits}), no_order) as router:
        async with channel(f"127.0.0.1:{router.grpc_port}") as way:
            yield InferenceServiceStub(way)
            await RouterLedger(router.components).settle()


def frames(text: str) -> list[Any]:
    """The frames of an event stream; the end mark stays a string."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def events(text: str) -> list[Any]:
    """The data of a stream whose events have names; each has that name as its type."""
    found = []
    for frame in text.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert event["type"] == name.removeprefix("event: ")
        found.append(event)
    return found


async def collect(call: grpc.aio.UnaryStreamCall[Any, Any]) -> list[Any]:
    return [message async for message in call]
