"""A whole cluster as processes: real broker, real index, real services, a tiny model.

Workers can be added, killed and asked for their ledgers; nothing here sleeps to wait for anything
but the next look at a condition with a deadline.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import tokenizers
from tests.servers import nats_server, redis_server
from tests.tiny_models import VOCAB_SIZE, save_tiny_model

from ferryman.cache.keys import as_token_ids, page_keys, root_key
from ferryman.client import Client
from ferryman.llm import LLM
from ferryman.model.registry import load_model
from ferryman.runtime.embedded import free_port
from ferryman.runtime.settings import as_environment
from ferryman.schedule.request import FinishReason, SamplingParams
from ferryman.wire.nats_bus import NatsBus, NatsOptions, nats_bus
from ferryman.wire.public import GenerateFinished, TokenChunk
from ferryman.wire.rpc import channel
from ferryman.wire.subjects import Subjects
from ferryman.wire.v1 import hostcache_pb2
from ferryman.wire.v1.hostcache_pb2_grpc import HostCacheServiceStub
from ferryman.wire.values import Usage

START_SECONDS = 90.0
PAGE_SIZE = 16
STARTED = ("decode", "prefill", "hostcache", "router")


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
    """One process: its ready line, and where its log is."""

    role: str
    process: subprocess.Popen[str]
    log: Path
    ready: Mapping[str, Any] = field(default_factory=dict)

    def await_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"{self.role} ended at once:\n{self.log.read_text()[-3000:]}"
        self.ready = json.loads(line)

    def ledger(self) -> dict[str, Any]:
        """Who holds which slots, by `/debug/ledger`."""
        answer = httpx.get(f"http://{self.ready['observe']}/debug/ledger", timeout=10)
        ledgers: dict[str, Any] = answer.json()
        return ledgers

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)


@dataclass(frozen=True)
class Shape:
    """How many workers, and how their engines run."""

    num_prefill: int = 1
    num_decode: int = 1
    overlap: bool = True
    chunk_tokens: int = 32
    max_running: int = 8
    memory_bytes: int = 24 << 20
    dtype: str = "float64"


@dataclass
class Generated:
    """One answer as the SDK saw it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Mapping[int, float]] = field(default_factory=list)
    reason: FinishReason | None = None
    usage: Usage | None = None


class Cluster:
    """Processes of one cluster and the ways to speak to it."""

    def __init__(self, model: Path, folder: Path, shape: Shape, nats: str, redis: str) -> None:
        self.model, self.folder, self.shape = model, folder, shape
        self.nats, self.redis = nats, redis
        self.hostcache_port = free_port()
        self.services: list[Service] = []

    def start(self, role: str) -> Service:
        log = self.folder / f"{role}-{len(self.services)}.log"
        environment = {
            **os.environ,
            **as_environment(f"FERRYMAN_{role.upper()}_", self._settings(role)),
            "OMP_NUM_THREADS": "1",
        }
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", f"ferryman_{role}"],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        service = Service(role, process, log)
        self.services.append(service)
        return service

    def _settings(self, role: str) -> dict[str, Any]:
        life = {"parent_pid": os.getpid(), "drain_seconds": 20}
        common: dict[str, Any] = {"bus": {"url": self.nats}, "life": life}
        if role == "hostcache":
            listen = {"port": self.hostcache_port}
            index = {"url": self.redis}
            return {**common, "listen": listen, "index": index, "memory_bytes": 32 << 20}
        if role == "router":
            index = {"url": self.redis}
            ports = {"http": {"port": 0}, "grpc": {"port": 0}}
            return {**common, **ports, "index": index, "model": self.model, "served_name": "tiny"}
        worker = {
            "model": self.model,
            "dtype": self.shape.dtype,
            "page_size": PAGE_SIZE,
            "chunk_tokens": self.shape.chunk_tokens,
            "max_running": self.shape.max_running,
            "memory_bytes": self.shape.memory_bytes,
            "overlap": self.shape.overlap,
            "num_threads": 1,
        }
        address = f"127.0.0.1:{self.hostcache_port}"
        return {**common, "worker": worker, "hostcache": {"address": address}}

    def of_role(self, role: str) -> list[Service]:
        """Those that run."""
        alive = [service for service in self.services if service.process.poll() is None]
        return [service for service in alive if service.role == role]

    @property
    def http(self) -> str:
        return f"http://{self.of_role('router')[0].ready['http']}"

    @property
    def grpc(self) -> str:
        return str(self.of_role("router")[0].ready["grpc"])

    def await_workers(self, **wanted: int) -> None:
        """Until the router counts so many workers of each role."""

        def counts() -> bool:
            with suppress(httpx.HTTPError):
                answer = httpx.get(f"{self.http}/ready", timeout=5).json()
                return all(answer["workers"].get(role, 0) == n for role, n in wanted.items())
            return False

        wait_until(counts, f"workers {wanted}")

    @asynccontextmanager
    async def bus(self) -> AsyncIterator[NatsBus]:
        async with nats_bus(NatsOptions(self.nats, "tests")) as bus:
            await bus.connected()
            yield bus

    async def flush_device(self, role: str) -> None:
        """Drops what workers of a role have cached on their devices and nobody uses."""
        async with self.bus() as bus:
            for service in self.of_role(role):
                subject = Subjects().control(str(service.ready["worker_id"]), "flush")
                await bus.request(subject, b"", timeout_seconds=5)

    async def await_stored(self, token_ids: Sequence[int]) -> None:
        """Until the host-cache holds a usable prefix of all full pages of a prompt."""
        manifest = load_model(self.model, self.shape.dtype, page_size=PAGE_SIZE).manifest
        keys = page_keys(root_key(manifest), as_token_ids(token_ids), PAGE_SIZE)
        (hostcache,) = self.of_role("hostcache")
        async with channel(str(hostcache.ready["address"])) as way:
            stub = HostCacheServiceStub(way)
            request = hostcache_pb2.LookupRequest(
                epoch=int(hostcache.ready["epoch"]), page_keys=b"".join(keys)
            )
            async with asyncio.timeout(20):
                while (await stub.Lookup(request)).usable_pages < len(keys):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)  # another process stores; there is no event here

    def assert_ledgers_balance(self) -> None:
        """Nothing is held any more but by the prefix trees."""
        workers = [*self.of_role("prefill"), *self.of_role("decode")]

        def all_quiet() -> bool:
            ledgers = [one for worker in workers for one in worker.ledger().values()]
            return all(one["balances"] and set(one["by_role"]) <= {"tree"} for one in ledgers)

        wait_until(all_quiet, "ledgers to balance", lambda: [w.ledger() for w in workers])

    def stop(self) -> None:
        for role in ("router", "prefill", "decode", "hostcache"):
            for service in self.of_role(role):
                service.process.send_signal(signal.SIGTERM)
        for service in self.services:
            try:
                service.process.wait(timeout=30)
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


@contextmanager
def running_cluster(model: Path, folder: Path, shape: Shape) -> Iterator[Cluster]:
    """A cluster that is ready, for the length of a block; ends with every process gone."""
    compile_kernels(model, shape)
    with ExitStack() as stack:
        nats, redis = stack.enter_context(nats_server()), stack.enter_context(redis_server())
        cluster = Cluster(model, folder, shape, nats, redis)
        stack.callback(cluster.stop)
        numbers = {"prefill": shape.num_prefill, "decode": shape.num_decode}
        started = [cluster.start(role) for role in STARTED for _ in range(numbers.get(role, 1))]
        for service in started:
            service.await_ready()
        cluster.await_workers(prefill=shape.num_prefill, decode=shape.num_decode)
        yield cluster


def compile_kernels(model: Path, shape: Shape) -> None:
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
        if isinstance(event, TokenChunk):
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
