"""A whole cluster as processes: real broker, real index, real services, a tiny model.

Workers can be added, killed and asked for their ledgers; nothing here sleeps to wait for anything
but the next look at a condition with a deadline.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import tokenizers
from tests.cluster_keys import KEY, key_file_in, token_of
from tests.forked_services import ServiceProcess, start_service
from tests.planes import CHOICES
from tests.servers import TESTS, locked_nats_server, redis_server
from tests.tiny_models import VOCAB_SIZE, save_tiny_model

from ferryman.cache.keys import PageKey, as_token_ids, page_keys, root_key
from ferryman.cache.manifest import StateManifest
from ferryman.cache.units import Tier
from ferryman.client import Client
from ferryman.llm import LLM
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_drafted, load_model
from ferryman.runtime.embedded import free_ports
from ferryman.runtime.lifecycle import decode_event
from ferryman.schedule.prompt_scores import Position, PromptScores, by_position
from ferryman.schedule.request import FinishReason, SamplingParams
from ferryman.security.credentials import ClusterRole
from ferryman.security.credentials_file import write_all_credentials
from ferryman.settings.sources import as_environment
from ferryman.wire.grpc.rpc import channel
from ferryman.wire.handoff.nixl_library import has_nixl
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.nats_bus import NatsBus, nats_bus
from ferryman.wire.nats.subjects import Subjects
from ferryman.wire.plane_values import GRPC, NIXL
from ferryman.wire.public import GenerateFinished, TokenChunk
from ferryman.wire.v1 import hostcache_pb2
from ferryman.wire.v1.hostcache_pb2_grpc import HostCacheServiceStub
from ferryman.wire.values import Usage

START_SECONDS = 90.0
PAGE_SIZE = 16
NO_SETTINGS: Mapping[str, Any] = {}
# NIXL wherever its library works at all, by the name of its danger (`tests/planes.py`).
FAST_PLANE = NIXL if has_nixl() else GRPC
STARTED = ("decode", "prefill", "both", "hostcache", "router")
WORKERS = ("prefill", "decode", "both")
AS_OBSERVER = {"authorization": f"Bearer {token_of(ClusterRole.OBSERVER)}"}


def save_served_model(folder: Path, variant: str) -> Path:
    """A tiny model with a tokenizer: token i is the word `w<i>`."""
    save_tiny_model(folder, variant)
    vocab = {f"w{i}": i for i in range(VOCAB_SIZE)}
    model = tokenizers.models.WordLevel(vocab, unk_token="w0")
    encoder = tokenizers.Tokenizer(model)
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    encoder.save(str(folder / "tokenizer.json"))
    return folder


@dataclass
class Service:
    """One process: its node, its ready line, and where its log is."""

    role: str
    process: ServiceProcess
    log: Path
    node: int = 0
    ready: Mapping[str, Any] = field(default_factory=dict)

    def await_ready(self) -> None:
        assert self.process.stdout is not None
        events = map(json.loads, self.process.stdout)  # a worker tells first how far it has loaded
        ready = next((event for event in events if event["event"] == "ready"), None)
        assert ready, f"{self.role} ended at once:\n{self.log.read_text()[-3000:]}"
        self.ready = ready

    def ledger(self) -> dict[str, Any]:
        """The holders of the slots, from `/debug/ledger`."""
        ledgers: dict[str, Any] = self.read("/debug/ledger").json()
        return ledgers

    def metrics(self) -> str:
        """As Prometheus reads them."""
        return self.read("/metrics").text

    def shown(self, *names: str) -> int:
        """The sum of such metrics of its role, over the kinds."""
        pattern = rf"^ferryman_{self.role}_(?:{'|'.join(names)}) (\S+)$"
        return sum(int(float(value)) for value in re.findall(pattern, self.metrics(), re.MULTILINE))

    def read(self, path: str) -> httpx.Response:
        """Its answer to an observer."""
        where = self.ready.get("observe") or self.ready["http"]
        return httpx.get(f"http://{where}{path}", headers=AS_OBSERVER, timeout=120)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=120)


@dataclass(frozen=True)
class ClusterShape:
    """The number of workers, and the options of their engines.

    Each of `num_nodes` has a host-cache; the first `worker_nodes` of them have `num_prefill` and
    `num_decode` workers each, and `num_both` that do both. With `has_storage` a node has a folder
    that outlives its processes. A Redis, a host-cache or another node that takes longer than
    `patience_seconds` counts as hung: long enough for a busy machine. `settings` override those of
    a role.
    """

    num_nodes: int = 1
    worker_nodes: int = 1
    has_storage: bool = False
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    num_prefill: int = 1
    num_decode: int = 1
    num_both: int = 0
    overlap: bool = True
    chunk_tokens: int = 32
    max_running: int = 8
    memory_bytes: int = 24 << 20
    dtype: str = "float64"
    patience_seconds: float = 5.0


@dataclass
class Generated:
    """One answer as the SDK saw it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Mapping[int, float]] = field(default_factory=list)
    prompt_logprobs: tuple[Position, ...] = ()
    reason: FinishReason | None = None
    usage: Usage | None = None


class Cluster:
    """Processes of one cluster and the ways to speak to it."""

    def __init__(
        self, model: Path, folder: Path, shape: ClusterShape, nats: str, redis: str
    ) -> None:
        self.model, self.folder, self.shape = model, folder, shape
        self.nats, self.redis = nats, redis
        self.key_file = key_file_in(folder)
        self.credentials = write_all_credentials(folder, KEY)
        self.hostcache_ports = free_ports(shape.num_nodes)
        self.services: list[Service] = []

    def start(self, role: str, node: int = 0, settings: Mapping[str, Any] = NO_SETTINGS) -> Service:
        """A process of this role on a node; `settings` for this one alone come on top."""
        log = self.folder / f"{role}-{len(self.services)}.log"
        of_shape = {**self._settings(role, node), **self.shape.settings.get(role, {})}
        environment = {
            **os.environ,
            **as_environment({**of_shape, **settings}, role),
            "OMP_NUM_THREADS": "1",
        }
        with log.open("w") as stderr:
            process = start_service(f"ferryman_{role}", environment, stderr)
        service = Service(role, process, log, node)
        self.services.append(service)
        return service

    def storage_folder(self, node: int = 0) -> Path:
        """Where the host-cache of a node keeps its storage tier."""
        return self.folder / f"storage-{node}"

    @property
    def redis_of_services(self) -> str:
        """Its Redis has no users but the default one."""
        return self.redis.replace("redis://", "redis://default@")

    def _settings(self, role: str, node: int) -> dict[str, Any]:
        common: dict[str, Any] = {
            "nats_url": self.nats,
            "credentials_file": self.credentials[ClusterRole(role)],
            "parent_pid": os.getpid(),
            "drain_seconds": 20,
            "lookup_seconds": self.shape.patience_seconds,
        }
        if role == "hostcache":
            return {**common, **self._hostcache(node)}
        if role == "router":
            return {
                **common,
                "http_port": 0,
                "grpc_port": 0,
                "redis_url": self.redis_of_services,
                "cluster_key_file": self.key_file,
                "model": self.model,
                "served_name": "tiny",
            }
        return {
            **common,
            "model": self.model,
            "dtype": self.shape.dtype,
            "page_size": PAGE_SIZE,
            "chunk_tokens": self.shape.chunk_tokens,
            "max_running": self.shape.max_running,
            "memory_bytes": self.shape.memory_bytes,
            "overlap": self.shape.overlap,
            "num_threads": 1,
            "hostcache_address": f"127.0.0.1:{self.hostcache_ports[node]}",
        }

    def _hostcache(self, node: int) -> dict[str, Any]:
        mine: dict[str, Any] = {
            "port": self.hostcache_ports[node],
            "redis_url": self.redis_of_services,
            "host_memory": 32 << 20,
            "node": f"node-{node}",
            "cluster_key_file": self.key_file,
        }
        if self.shape.has_storage:
            mine["storage_dir"] = self.storage_folder(node)
        return mine

    def of_role(self, role: str) -> list[Service]:
        """Those that run."""
        alive = [service for service in self.services if service.process.poll() is None]
        return [service for service in alive if service.role == role]

    def hostcache(self, node: int = 0) -> Service:
        """The host-cache of a node, which runs."""
        (one,) = (service for service in self.of_role("hostcache") if service.node == node)
        return one

    @property
    def http(self) -> str:
        return f"http://{self.of_role('router')[0].ready['http']}"

    @property
    def grpc(self) -> str:
        return str(self.of_role("router")[0].ready["grpc"])

    def await_workers(self, **wanted: int) -> None:
        """Waits until the router counts the wanted number of workers of each role."""

        def counts() -> bool:
            with suppress(httpx.HTTPError):
                answer = self.of_role("router")[0].read("/ready").json()
                return all(answer["workers"].get(role, 0) == n for role, n in wanted.items())
            return False

        wait_until(counts, f"workers {wanted}")

    def await_routers(self, number: int) -> None:
        """Until so many routers run, and each is ready."""
        routers = self.of_role("router")
        assert len(routers) == number
        wait_until(
            lambda: all(one.read("/ready").status_code == 200 for one in routers),
            f"{number} routers",
            seconds=90,
        )

    def await_attached(self) -> None:
        """Until every worker maps its node's arena."""
        wait_until(lambda: all(map(self._is_attached, self.of_role("hostcache"))), "attachment")

    def _is_attached(self, hostcache: Service) -> bool:
        workers = [worker for role in WORKERS for worker in self.of_role(role)]
        wanted = sum(worker.node == hostcache.node for worker in workers)
        return f"ferryman_hostcache_store_workers {wanted}.0" in hostcache.metrics()

    @asynccontextmanager
    async def bus(self) -> AsyncIterator[NatsBus]:
        async with nats_bus(NatsOptions(self.nats, "tests", TESTS)) as bus:
            await bus.connected()
            yield bus

    async def plane_of(self, request_id: str) -> str:
        """On which plane a request was handed off, as its events say."""
        handed_off = f"{Subjects().root}.life.prefill.*.{request_id}.handed_off"
        async with self.bus() as bus, asyncio.timeout(120):
            # Another process says it; what was said is only asked for.
            while not (said := await bus.history(handed_off, max_events=1)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return str(decode_event(said[0].payload).facts["path"])

    async def flush_device(self, role: str) -> None:
        """Drops the unused cached units from the devices of the workers of a role."""
        async with self.bus() as bus:
            for service in self.of_role(role):
                subject = Subjects().control(str(service.ready["worker_id"]), "flush")
                await bus.request(subject, b"", timeout_seconds=60)

    async def flush_host(self, token_ids: Sequence[int], node: int = 0) -> None:
        """Flushes a node's arena until it has nothing of a prompt: what is read or written at that
        moment stays."""
        keys = self.keys_of(token_ids)
        subject = Subjects().control(str(self.hostcache(node).ready["worker_id"]), "flush")
        async with self.bus() as bus, self._lookups(keys, node) as look, asyncio.timeout(120):
            while True:
                await bus.request(subject, b"", timeout_seconds=60)
                if not (await look()).resident:
                    return

    def keys_of(self, token_ids: Sequence[int]) -> tuple[PageKey, ...]:
        """Of all full pages of a prompt."""
        return page_keys(root_key(self._manifest()), as_token_ids(token_ids), PAGE_SIZE)

    def _manifest(self) -> StateManifest:
        chosen = self.shape.settings.get("decode", {})
        draft, kv_dtype = chosen.get("draft", "ngram"), chosen.get("kv_dtype", "auto")
        options = LoadOptions(self.shape.dtype, page_size=PAGE_SIZE, kv_dtype=kv_dtype)
        if draft == "ngram":
            return load_model(self.model, options).manifest
        return load_drafted(self.model, draft, options).manifest

    async def await_stored(
        self, token_ids: Sequence[int], *, node: int = 0, tier: Tier = Tier.HOST
    ) -> None:
        """Until a node's tier holds a usable prefix of all full pages of a prompt.

        In storage: all full pages, and the snapshot at their end where the model has snapshots.
        """
        keys = self.keys_of(token_ids)
        async with self._lookups(keys, node) as look, asyncio.timeout(120):
            # Another process stores; there is no event here.
            while not _has_all(await look(), len(keys), tier):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    @asynccontextmanager
    async def _lookups(
        self, keys: Sequence[PageKey], node: int
    ) -> AsyncIterator[Callable[[], Awaitable[hostcache_pb2.LookupResponse]]]:
        """Each says what a node's host-cache has of these pages."""
        hostcache = self.hostcache(node)
        token = token_of(ClusterRole.HOST_CACHE)
        async with channel(str(hostcache.ready["address"]), token) as way:
            request = hostcache_pb2.LookupRequest(
                epoch=int(hostcache.ready["epoch"]), page_keys=b"".join(keys)
            )
            yield partial(HostCacheServiceStub(way).Lookup, request)

    async def hostcache_stats(self, node: int = 0) -> hostcache_pb2.StatsResponse:
        """The counts of a node's host-cache."""
        address = str(self.hostcache(node).ready["address"])
        async with channel(address, token_of(ClusterRole.OBSERVER)) as way:
            stats = HostCacheServiceStub(way).Stats
            found: hostcache_pb2.StatsResponse = await stats(hostcache_pb2.StatsRequest())
            return found

    def assert_ledgers_balance(self) -> None:
        """Waits until only the prefix trees hold slots."""
        workers = [worker for role in WORKERS for worker in self.of_role(role)]

        def all_quiet() -> bool:
            ledgers = [one for worker in workers for one in worker.ledger().values()]
            return all(one["balances"] and set(one["by_role"]) <= {"tree"} for one in ledgers)

        wait_until(all_quiet, "ledgers to balance", lambda: [w.ledger() for w in workers])

    def stop(self) -> None:
        for role in ("router", *WORKERS, "hostcache"):
            for service in self.of_role(role):
                service.process.send_signal(signal.SIGTERM)
        for service in self.services:
            try:
                service.process.wait(timeout=120)
            except subprocess.TimeoutExpired:
                service.kill()
            assert service.process.stdout is not None
            service.process.stdout.close()


def wait_until(
    condition: Callable[[], bool],
    what: str,
    details: Callable[[], object] = lambda: "",
    seconds: float = 30.0,
) -> None:
    """Looks again and again until a deadline; fails with what it saw last."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}: {details()}"
        time.sleep(0.02)


def _has_all(found: hostcache_pb2.LookupResponse, num_pages: int, tier: Tier) -> bool:
    if tier is Tier.HOST:
        return found.usable_pages == num_pages
    kinds = {each.kind for each in found.resident} or {each.kind for each in found.in_storage}
    ends = {each.kind for each in found.in_storage if each.end_page == num_pages}
    return bool(kinds) and kinds <= ends


def on_plane(plane: str) -> dict[str, dict[str, Any]]:
    """Settings of workers that hand off on one plane alone."""
    return {role: {"planes": CHOICES[plane]} for role in ("prefill", "decode")}


@contextmanager
def running_cluster(model: Path, folder: Path, shape: ClusterShape) -> Iterator[Cluster]:
    """A cluster that is ready, for the length of a block; ends with every process gone."""
    compile_kernels(model, shape)
    with (
        locked_nats_server() as nats,
        redis_server() as redis,
        started_cluster(Cluster(model, folder, shape, nats, redis)) as cluster,
    ):
        yield cluster


@contextmanager
def started_cluster(cluster: Cluster) -> Iterator[Cluster]:
    """All processes of a cluster whose broker and index run already."""
    shape = cluster.shape
    both = shape.num_both
    numbers = {"prefill": shape.num_prefill, "decode": shape.num_decode, "both": both}
    nodes = {"router": 1, "hostcache": shape.num_nodes}
    places = [
        (role, node)
        for role in STARTED
        for node in range(nodes.get(role, shape.worker_nodes))
        for _ in range(numbers.get(role, 1))
    ]
    with ExitStack() as stack:
        stack.callback(cluster.stop)
        for service in [cluster.start(role, node) for role, node in places]:
            service.await_ready()
        cluster.await_workers(
            prefill=(shape.num_prefill + both) * shape.worker_nodes,
            decode=(shape.num_decode + both) * shape.worker_nodes,
        )
        yield cluster


def compile_kernels(model: Path, shape: ClusterShape) -> None:
    """Once, here, into the cache on disk; or every worker would, all at the same time."""
    with LLM(model, dtype=shape.dtype, page_size=PAGE_SIZE, memory_bytes=32 << 20):
        pass


async def generate(
    client: Client,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    request_id: str = "",
    deadline_seconds: float = 60.0,
) -> Generated:
    """One request through the SDK, collected; offsets are checked on the way."""
    found = Generated()
    async for event in client.generate(
        list(prompt), sampling, request_id=request_id, deadline_seconds=deadline_seconds
    ):
        if isinstance(event, PromptScores):
            assert not found.token_ids, "the prompt comes before the answer"
            found.prompt_logprobs += by_position(event)
        elif isinstance(event, TokenChunk):
            assert event.offset == len(found.token_ids), "each token once and in order"
            found.token_ids += event.token_ids
            found.logprobs += event.logprobs
        elif isinstance(event, GenerateFinished):
            found.reason, found.usage = event.reason, event.usage
    return found


async def generate_all(
    client: Client, prompts: Sequence[Sequence[int]], sampling: SamplingParams
) -> list[Generated]:
    """All at once."""
    return list(await asyncio.gather(*(generate(client, p, sampling) for p in prompts)))
