"""Membership of a process in its cluster: the name of one life, the bus, heartbeats, and answers to
orders.

Routers, workers and host-caches join in the same way. They differ in what their heartbeats say and
in the orders that they know.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ferryman.errors import InvalidRequest
from ferryman.handoff.lifecycle import LifecycleEntry
from ferryman.ids import NO_REQUEST, make_epoch, make_life_secret, worker_id_of
from ferryman.runtime.background import next_tick
from ferryman.runtime.life import alongside
from ferryman.runtime.lifecycle import EventHeaders, LifecyclePublisher, Publisher, no_headers
from ferryman.runtime.spans.process_spans import NO_TRACING, Tracing, tracing
from ferryman.runtime.traces import parse_traceparent
from ferryman.runtime.version import package_version
from ferryman.settings.groups import BusSettings, TracingSettings
from ferryman.wire.grpc.role_tokens import GrpcAccess
from ferryman.wire.nats.bus import Bus, BusMessage
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.heartbeat import HEARTBEAT_SECONDS, Beat, beat_to_bytes
from ferryman.wire.nats.nats_bus import nats_bus
from ferryman.wire.nats.subjects import ControlSubject, Subjects

# Obeys an order with this payload; the result goes back to the sender, or the error raised. The
# next order to the process waits for it, so one that takes time has a limit.
Order = Callable[[bytes], bytes | Awaitable[bytes]]
Orders = Mapping[str, Order]
Facts = Callable[[], Mapping[str, object]]

TRACE_DESTINATION = "Nats-Trace-Dest"
"""The header by which each nats-server on the way is asked to say what it did with a message.
Source: https://github.com/nats-io/nats-architecture-and-design/blob/main/adr/ADR-41.md"""


@asynccontextmanager
async def joined(
    settings: BusSettings,
    role: str,
    access: GrpcAccess,
    traced: TracingSettings,
) -> AsyncIterator[Membership]:
    """A new life of a process of this role, for the length of a block.

    The broker may come later. Raises ConfigError for a collector of spans that cannot be used.
    """
    secret = make_life_secret()
    worker_id = worker_id_of(role, secret)
    options = NatsOptions(
        settings.url,
        worker_id,
        access.credentials.nats if access.credentials else None,
        life_secret=secret,
        authorities=access.authorities,
    )
    subjects = Subjects(settings.cluster)
    async with tracing(traced, role, worker_id) as spans, nats_bus(options) as bus:
        headers = broker_traces(subjects) if traced.broker_traces else no_headers
        yield Membership(role, worker_id, make_epoch(), bus, subjects, spans, headers)


@dataclass(frozen=True, slots=True)
class Membership:
    """One life of one process of the cluster, and its bus."""

    role: str
    worker_id: str
    epoch: int
    bus: Bus
    subjects: Subjects
    tracing: Tracing = NO_TRACING
    event_headers: EventHeaders = no_headers

    def lifecycle(self) -> LifecyclePublisher:
        """Publishes the lifecycle events of this life."""
        publisher = Publisher(self.role, self.worker_id, self.epoch)
        return LifecyclePublisher(
            self.bus.publish,
            self.subjects,
            publisher,
            watch=self.tracing.watch,
            headers=self.event_headers,
        )

    @asynccontextmanager
    async def beating(
        self, make_beat: Callable[[], Beat | None]
    ) -> AsyncIterator[Callable[[], None]]:
        """Sends a beat each second, for the length of a block.

        `make_beat` gives None while the process shall count as silent. The block has a call that
        sends a beat at once, for news that cannot wait for a second.
        """

        def beat() -> None:
            if made := make_beat():
                self.bus.offer(self.subjects.beat(self.role, self.worker_id), beat_to_bytes(made))

        async with alongside(_each_second(beat)):
            yield beat

    @asynccontextmanager
    async def reporting(
        self, make_beat: Callable[[], Beat | None], orders: Orders, facts: Facts = dict
    ) -> AsyncIterator[Callable[[], None]]:
        """Beats, as `beating` does, and answers orders, for the length of a block. `facts` are what
        it says about itself besides what all say."""
        orders = {**orders, "about": about_order(facts)}

        async def obey(message: BusMessage) -> bytes:
            subject = self.subjects.parse(message.subject)
            assert isinstance(subject, ControlSubject), "only control subjects are answered"
            if subject.verb not in orders:
                verbs = ", ".join(orders)
                raise InvalidRequest(
                    f"no order is called {subject.verb!r} here; this {self.role} knows {verbs}",
                    "verb",
                )
            answer = orders[subject.verb](message.payload)
            return answer if isinstance(answer, bytes) else await answer

        async with (
            self.bus.answering(self.subjects.all_control_of(self.worker_id), obey),
            self.beating(make_beat) as beat,
        ):
            yield beat


def broker_traces(subjects: Subjects) -> EventHeaders:
    """Asks the broker to trace the events of requests that are recorded by their trace."""

    def headers(event: LifecycleEntry) -> Mapping[str, str]:
        context = parse_traceparent(event.traceparent)
        if context is None or not context.is_sampled or event.request_id == NO_REQUEST:
            return {}
        return {TRACE_DESTINATION: subjects.hops(event.role, event.worker_id, event.request_id)}

    return headers


async def _each_second(beat: Callable[[], None]) -> None:
    while True:
        beat()
        await next_tick(HEARTBEAT_SECONDS)


def drain_order(drain: Callable[[], None]) -> Order:
    """The order that every process knows: take nothing new, finish, end."""

    def obey(_payload: bytes) -> bytes:
        drain()
        return b'{"draining": true}'

    return obey


def about_order(facts: Facts) -> Callable[[bytes], bytes]:
    """The order that every process answers for `ferryman doctor`: its version, its clock (seconds
    since 1970), host, process id, limit of open files, and its own `facts`."""

    def answer(_payload: bytes) -> bytes:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        content = {
            "version": package_version(),
            "clock": time.time(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "open_files": soft,
            **facts(),
        }
        return json.dumps(content).encode()

    return answer
