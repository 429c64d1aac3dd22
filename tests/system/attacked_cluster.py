"""A cluster of `ferryman up` with its defaults and an API key, as its attackers see it: they know
all addresses, have read all beats, and may have the credentials of one role."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import redis.asyncio as aioredis
from nats.aio.client import Client as NatsClient
from tests.cluster_keys import STRANGERS_KEY
from tests.harness.cluster import API_KEY, Up
from tests.system.forged_calls import CALLS, method_of
from tests.waiting import wait_until

from ferryman.client import Client
from ferryman.llm import LLM
from ferryman.schedule.request import SamplingParams
from ferryman.security.cluster_key import Purpose
from ferryman.security.credentials import ClusterRole, Login, RoleCredentials, credentials_of
from ferryman.security.key_file import read_key_file
from ferryman.wire.nats.bus import Messages
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.heartbeat import Heartbeat, beat_from_bytes
from ferryman.wire.nats.lifecycle_log import STREAM
from ferryman.wire.nats.nats_bus import nats_bus
from ferryman.wire.nats.permissions import inbox_of
from ferryman.wire.nats.subjects import LifeSubject, Subjects
from ferryman.wire.public import GenerateEvent, GenerateStarted, TokenChunk
from ferryman_launcher.options import demo_model

FAILSAFE_SECONDS = 120
SUBJECTS = Subjects("local")
PROMPT = "The red kite is in Oslo. The blue kite is in Lima. Where is the red kite?"
ANSWER = SamplingParams(max_tokens=96, temperature=1.0, seed=13, ignore_eos=True)
LEAKED = (ClusterRole.PREFILL, ClusterRole.DECODE, ClusterRole.HOST_CACHE, ClusterRole.OBSERVER)
WORKERS = {"prefill", "decode", "hostcache"}


@dataclass(frozen=True)
class AttackedCluster:
    """`beats` has the last one of each role. `expected` are the tokens that answer PROMPT."""

    up: Up
    beats: Mapping[str, Heartbeat]
    router_id: str
    expected: tuple[int, ...]

    def leaked(self, role: ClusterRole) -> RoleCredentials:
        """The credentials in a role's file."""
        return self.up.credentials(role)

    @property
    def tenant_salt(self) -> bytes:
        """The one tenant's, made from the cluster's key: nobody else can name its pages."""
        key = read_key_file(self.up.state_dir / "cluster.key")
        return key.subkey(Purpose.TENANT_SALT).tag(API_KEY.encode())

    def metric(self, role: str, pattern: str) -> float:
        """The sum of a process's metrics whose names and labels begin so."""
        lines = self.metrics(role).splitlines()
        found = [line for line in lines if re.match(rf"ferryman_{role}_{pattern}", line)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def metrics(self, role: str) -> str:
        """As an observer reads them."""
        return self.read(role, "/metrics", self.up.as_observer["authorization"]).text

    def read(self, role: str, path: str, authorization: str = "") -> httpx.Response:
        """The answer of a process to somebody who shows this, or nothing."""
        place = self.up.said["http"] if role == "router" else f"http://{self.ready(role)}"
        headers = {"authorization": authorization} if authorization else {}
        return httpx.get(f"{place}{path}", headers=headers, timeout=FAILSAFE_SECONDS)

    def refused_calls(self, reason: str) -> Counter[str]:
        """The calls of `ForgedCalls` that workers have counted as refused."""
        shown = {role: self.metrics(role) for role in WORKERS}
        found: Counter[str] = Counter()
        for call, (role, _) in CALLS.items():
            labels = f'{{method="{method_of(call)}",reason="{reason}"}}'
            name = re.escape(f"ferryman_{role}_refused_calls_total{labels}")
            for number in re.findall(rf"^{name} (\S+)$", shown[role], re.MULTILINE):
                found[call] = int(float(number))
        return found

    def await_logged(self, words: str, number: int) -> None:
        """Until the broker's log, which `ferryman up` writes, has these words so often."""
        log = self.up.log
        wait_until(lambda: log("nats").count(words) >= number, words, seconds=FAILSAFE_SECONDS)
        assert log("nats").count(words) == number

    def ready(self, role: str) -> str:
        """Where a worker shows its metrics: it says so when it is ready."""
        (found,) = re.findall(r'"observe": "([^"]+)"', self.up.log(role))
        return str(found)

    @asynccontextmanager
    async def nats_client(self, login: Login) -> AsyncIterator[tuple[NatsClient, list[str]]]:
        """A client without our rules, as an attacker has one, and what the broker refused it."""
        async with raw_nats_client(self.up.said["nats"], login) as found:
            yield found

    async def logged(self, request_id: str) -> None:
        """Until the log has the event that begins a request."""
        login = self.leaked(ClusterRole.OBSERVER).nats
        received = f"{SUBJECTS.root}.life.router.*.{request_id}.received"
        async with nats_bus(NatsOptions(self.up.said["nats"], "observer", login)) as bus:
            await bus.connected()
            while not await bus.history(received, max_events=1):
                pass

    async def num_logged(self) -> int:
        """The number of events in the log, as an observer sees it."""
        async with self.nats_client(self.leaked(ClusterRole.OBSERVER).nats) as (client, _):
            return (await client.jetstream().stream_info(STREAM)).state.messages

    @asynccontextmanager
    async def redis_client(self, login: Login | None) -> AsyncIterator[Any]:
        user, password = (login.user, login.password) if login else (None, None)
        url = self.up.said["redis"]
        async with aioredis.Redis.from_url(url, username=user, password=password) as client:
            yield client

    async def redis_refusals(self) -> int:
        """The commands and logins that Redis has refused, as an observer reads them."""
        async with self.redis_client(self.leaked(ClusterRole.OBSERVER).redis) as observer:
            errors = await observer.info("errorstats")
        kinds = ("NOAUTH", "WRONGPASS", "NOPERM")
        return sum(int(errors.get(f"errorstat_{kind}", {}).get("count", 0)) for kind in kinds)

    @asynccontextmanager
    async def stream_beside(self) -> AsyncIterator[str]:
        """An answer under way while the block runs, by its id; then it is read to its end, and it
        is right."""
        async with self.running(ANSWER) as (request_id, first, events):
            yield request_id
            rest = [each async for each in events if isinstance(each, TokenChunk)]
        token_ids = [token for chunk in (first, *rest) for token in chunk.token_ids]
        assert tuple(token_ids) == self.expected

    @asynccontextmanager
    async def running(
        self, sampling: SamplingParams
    ) -> AsyncIterator[tuple[str, TokenChunk, AsyncIterator[GenerateEvent]]]:
        """A request that decodes: its id, its first tokens, and what comes after them."""
        async with (
            asyncio.timeout(FAILSAFE_SECONDS),
            Client(self.up.said["grpc"], api_key=API_KEY) as client,
            aclosing(client.generate(PROMPT, sampling)) as events,
        ):
            started, first = await anext(events), await anext(events)
            assert isinstance(started, GenerateStarted)
            assert isinstance(first, TokenChunk)
            yield started.request_id, first, events


@asynccontextmanager
async def raw_nats_client(url: str, login: Login) -> AsyncIterator[tuple[NatsClient, list[str]]]:
    refused: list[str] = []

    async def note(error: Exception) -> None:
        refused.append(str(error))

    client = NatsClient()
    try:
        await client.connect(
            url,
            user=login.user,
            password=login.password,
            error_cb=note,
            inbox_prefix=inbox_of(login.user),
            allow_reconnect=False,
        )
        yield client, refused
    finally:
        await client.close()


async def refusals(client: NatsClient, refused: list[str], number: int) -> None:
    """Until the broker has refused a client so many things."""
    async with asyncio.timeout(FAILSAFE_SECONDS):
        while len(refused) < number:
            await client.flush(FAILSAFE_SECONDS)


async def look_at(up: Up) -> AttackedCluster:
    """All that an observer sees of a cluster, and the answer that one process gives."""
    up.complete("seen", max_tokens=1)
    login = up.credentials(ClusterRole.OBSERVER).nats
    async with (
        asyncio.timeout(FAILSAFE_SECONDS),
        nats_bus(NatsOptions(up.said["nats"], "observer", login)) as bus,
        bus.subscribed(SUBJECTS.all_beats) as heard,
    ):
        await bus.connected()
        beats = await first_beats(heard)
        (received, *_) = await bus.history(SUBJECTS.all_received, max_events=1)
    told = SUBJECTS.parse(received.subject)
    assert isinstance(told, LifeSubject)
    with LLM(demo_model(), dtype="float32", page_size=16, memory_bytes=1 << 26) as llm:
        (answer,) = llm.generate(PROMPT, ANSWER)
    return AttackedCluster(up, beats, told.worker_id, tuple(answer.token_ids))


async def first_beats(heard: Messages) -> dict[str, Heartbeat]:
    """The first beat of each role."""
    found: dict[str, Heartbeat] = {}
    while found.keys() != WORKERS:
        beat = beat_from_bytes((await anext(heard)).payload)
        assert isinstance(beat, Heartbeat)
        if beat.role in WORKERS:
            found[beat.role] = beat
    return found


def strangers(role: ClusterRole) -> RoleCredentials:
    """The credentials of a role in another cluster."""
    return credentials_of(STRANGERS_KEY, role)
