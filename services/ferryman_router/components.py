"""The parts of a router that decide and remember, joined to its transports, and its reports of
itself: whether it is ready, its heartbeat, its gauges.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ferryman.grammar.compiler import BackgroundCompiler, GrammarCompiler
from ferryman.runtime.background import Background
from ferryman.runtime.lifecycle import LifecyclePublisher
from ferryman.runtime.membership import Membership
from ferryman.security.state_signatures import StateSigner
from ferryman.settings.router import LimitSettings
from ferryman.wire.grpc.rpc import Channels
from ferryman.wire.hostcache.unit_seals import UnitSeals
from ferryman.wire.nats.heartbeat import NO_STATE, Heartbeat
from ferryman.wire.nats.sender_proof import CheckSender
from ferryman.wire.redis.index import PrefixIndex
from ferryman.wire.signed_orders import RouterSignatures
from ferryman_router.intake.body_intake import Intake
from ferryman_router.intake.frontend import Frontend
from ferryman_router.request.context import Probation, RetryBudget, RouterContext
from ferryman_router.request.metrics import RouterMetrics, RouterStatistics
from ferryman_router.request.request_table import Evacuation, RequestTable
from ferryman_router.request.state_files import StateFiles
from ferryman_router.request.state_nodes import StateNodes
from ferryman_router.request.token_streams import TokenReader, WorkerStreams
from ferryman_router.request.worker_client import WorkerClient
from ferryman_router.routing.dispatcher import Dispatcher
from ferryman_router.routing.fleet import Effect, Fleet, WorkerJoined
from ferryman_router.routing.fleet_listener import FleetListener, Liveness, SenderChecks
from ferryman_router.routing.queue import WaitQueue
from ferryman_router.routing.quotas import Quotas
from ferryman_router.routing.routing_policy import RoutingCosts
from ferryman_router.routing.worker_starts import SERVING
from ferryman_router.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class StateKeys:
    """The checks of state: of a file's signature, and of the units that a host-cache sends."""

    signer: StateSigner
    seals: UnitSeals


@dataclass(frozen=True, slots=True)
class Transports:
    """The connections to other processes, the check of their messages, and the `signatures` of
    orders to them. Calls that outlive their request run in the `background`."""

    member: Membership
    channels: Channels
    lifecycle: LifecyclePublisher
    index: PrefixIndex
    check_sender: CheckSender
    signatures: RouterSignatures
    background: Background
    states: StateKeys


@dataclass(frozen=True, slots=True)
class Components:
    """The parts that others need to reach."""

    fleet: Fleet
    frontend: Frontend
    dispatcher: Dispatcher
    listener: FleetListener
    states: StateFiles

    async def run(self) -> None:
        """Dispatches, and looks after requests that stall or whose worker drains; for ever."""
        requests, evacuation = self.frontend.requests, Evacuation(self.frontend.ctx)

        def look(now: float) -> None:
            requests.check_stalled(now)
            evacuation.look(requests, now)

        await self.dispatcher.run(look, lambda: len(requests) > 0)


def make_components(
    limits: LimitSettings,
    model: ServedModel,
    transports: Transports,
    intake: Intake,
    quotas: Quotas,
) -> Components:
    """Builds all parts from plain values and transports. A part is built after those that it
    calls."""
    clock, patience = time.monotonic, limits.stream_patience_seconds
    router_id, background = transports.member.worker_id, transports.background
    fleet, requests, metrics = Fleet(limits.beat_timeout_seconds), RequestTable(), RouterMetrics()
    dispatcher = Dispatcher(
        fleet,
        WaitQueue(limits.max_queued, limits.max_queued_per_tenant),
        costs=RoutingCosts(),
        patience=limits.no_worker_seconds,
        clock=clock,
    )
    # The streams come after the dispatcher: a worker that joins or leaves makes it serve its queue.
    streams = WorkerStreams(
        TokenReader(router_id, transports.signatures),
        fleet,
        requests=requests,
        dispatcher=dispatcher,
        channels=transports.channels,
        background=background,
        metrics=metrics,
        patience=patience,
    )
    # Liveness reports a lost worker to the streams, which pass it on to all its requests at once.
    liveness = Liveness(
        fleet,
        patience=patience,
        connect=transports.channels.fresh,
        start=background.start,
        lost=streams.lose,
    )
    # A running request reaches all the parts in the context, so they are complete before the
    # frontend, the only part that makes requests.
    ctx = RouterContext(
        router_id=router_id,
        model=model,
        fleet=fleet,
        dispatcher=dispatcher,
        budget=RetryBudget(limits.retry_share, limits.retry_floor),
        probation=Probation(),
        workers=WorkerClient(
            fleet, transports.channels, metrics, transports.signatures, background.start
        ),
        liveness=liveness,
        ask_again=streams.ask_again,
        lifecycle=transports.lifecycle,
        index=transports.index,
        metrics=metrics,
        quotas=quotas,
        clock=clock,
        outlive=background.start,
        num_in_flight=requests.__len__,
    )
    grammars = GrammarCompiler.for_tokenizer(model.tokenizer, model.vocab)
    # Reading the vocabulary holds the interpreter's lock for seconds, so it comes before streams.
    grammars.warm_up()
    frontend = Frontend(ctx, requests, background, intake, limits, BackgroundCompiler(grammars))

    def happened(effect: Effect) -> None:
        streams.on_fleet_effect(effect)
        if isinstance(effect, WorkerJoined):
            ctx.workers.on_joined(effect.beat)

    # The listener is the last part: its first beat makes a worker join, and that calls all others.
    listener = FleetListener(
        transports.member.bus,
        transports.member.subjects,
        fleet,
        liveness,
        happened=happened,
        senders=SenderChecks(
            transports.check_sender, metrics.forged_messages, metrics.misplaced_beats
        ),
        background=background,
        clock=clock,
    )
    # A scrape may come as soon as the doors open, which the caller does after this.
    metrics.watch("bus", transports.member.bus.statistics)
    metrics.watch("", partial(_statistics, transports.index, dispatcher, requests))
    nodes = StateNodes(fleet, transports.channels, transports.states.seals, transports.signatures)
    states = StateFiles(ctx, requests, frontend.recent, nodes, transports.states.signer)
    return Components(fleet, frontend, dispatcher, listener, states)


def _statistics(
    index: PrefixIndex, dispatcher: Dispatcher, requests: RequestTable
) -> RouterStatistics:
    """The gauges that each scrape reads."""
    now = index.statistics()
    return RouterStatistics(
        index_away=now.is_away,
        index_misses_away=now.num_misses_away,
        index_forged=now.num_forged,
        index_refused=now.num_refused,
        queue_requests=len(dispatcher),
        queue_seconds=dispatcher.queue_seconds(),
        in_flight_requests=len(requests),
    )


class RouterTelemetry:
    """The readiness and the heartbeat of a router.

    Other routers do not need its heartbeats: people do, and `ferryman roll`, which restarts routers
    one by one.
    """

    def __init__(self, member: Membership, frontend: Frontend, max_in_flight: int) -> None:
        self.member, self._frontend = member, frontend
        self._max_in_flight = max_in_flight

    def readiness(self) -> tuple[bool, Mapping[str, Any]]:
        """Ready with one usable worker of each role; degraded while the broker is away. Until then
        it reports what is done for each role that has none."""
        now, is_draining = time.monotonic(), self._frontend.is_draining
        workers = {role: len(self._frontend.ctx.fleet.usable(role, now)) for role in SERVING}
        is_ready = all(workers.values()) and not is_draining
        is_connected = self.member.bus.is_connected
        patience = self._frontend.ctx.dispatcher.patience
        lacking = "starting" if patience.is_first_start else "waiting for workers"
        state = "draining" if is_draining else "ready" if is_ready else lacking
        if is_ready and not is_connected:
            state = "degraded"
        starts = list(patience.under_way(now))
        return is_ready, {
            "status": state,
            "workers": workers,
            "host_caches": len(self._frontend.ctx.fleet.host_caches()),
            "broker": is_connected,
            "starts": starts,
        }

    def beat(self, address: str) -> Heartbeat:
        """The heartbeat of the router at this gRPC address. A router without workers yet is not
        ready: no other one may be restarted before."""
        ctx = self._frontend.ctx
        num_queued = len(ctx.dispatcher)
        is_ready, _ = self.readiness()
        return Heartbeat(
            role=self.member.role,
            worker_id=self.member.worker_id,
            epoch=self.member.epoch,
            address=address,
            is_ready=is_ready,
            state=ctx.fleet.state() or NO_STATE,
            max_len=self._frontend.max_prompt_len + 1,
            num_running=max(0, len(self._frontend.requests) - num_queued),
            max_running=self._max_in_flight,
            num_queued=num_queued,
        )
