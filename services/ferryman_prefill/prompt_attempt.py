"""One attempt at one prompt, up to its first token: queued → prefetched → admitted → chunks.

`PrefillAttempt` hands the computed state to another worker; an attempt that goes on decoding where
its prompt was computed is one of `ferryman_both`. Both tell their caller, and the lifecycle log, of
the same progress.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from ferryman.cache.resume import ResumePlan
from ferryman.engine.engine import Engine
from ferryman.errors import Cancelled, DeadlineExceeded
from ferryman.grammar.compiler import CompiledGrammar
from ferryman.runtime.lifecycle import Fact, LifecyclePublisher
from ferryman.schedule.batch import Sampled
from ferryman.schedule.events import (
    ChunkDone,
    Drawn,
    Event,
    Finished,
    LoadCorrupt,
    LoadsDone,
    PromptScored,
    RequestFailed,
    SequenceAdmitted,
    SequenceHeld,
)
from ferryman.schedule.request import Request
from ferryman.tiers.prefetch_values import NOTHING_BROUGHT, Prefetched
from ferryman.wire import values
from ferryman.wire.grpc.rpc import tags_for
from ferryman.wire.grpc.status import failure_of
from ferryman.wire.hostcache.client import HostLease
from ferryman.wire.values import PrefillOrder, PrefillProgress, Usage
from ferryman.worker.cache_metrics import CacheMetrics
from ferryman.worker.handoff_writer import SendingSide
from ferryman.worker.host import HostTier
from ferryman.worker.loop import memory_ready
from ferryman.worker.summary import plan_facts, prefetch_facts, prompt_usage


@dataclass(frozen=True, slots=True)
class PrefillContext:
    """The parts that all attempts of this worker share. `run_limit` bounds the running attempts."""

    engine: Engine
    wake: asyncio.Event
    host: HostTier
    cache_metrics: CacheMetrics
    lifecycle: LifecyclePublisher
    run_limit: asyncio.Semaphore
    sending: SendingSide
    clock: Callable[[], float]


class PromptAttempt(ABC):
    """Runs in a task of its own; `progress` has messages for its caller, `inbox` events for it. The
    last of `progress` is None; the task's own result says why it ended.

    It holds the grammar of its request, so that the engine finds it compiled.
    """

    def __init__(
        self, order: PrefillOrder, ctx: PrefillContext, grammar: CompiledGrammar | None = None
    ) -> None:
        self.order = order
        self.grammar = grammar
        self.name = f"{order.context.request_id}.{order.context.attempt}"
        self.progress: asyncio.Queue[PrefillProgress | None] = asyncio.Queue()
        self.inbox: asyncio.Queue[Event] = asyncio.Queue()
        self.is_scheduled = False
        self._ctx = ctx
        self._usage = Usage(prompt_tokens=order.request.prompt_len)
        self._num_chunks = 0
        self._tags = tags_for(order.context)
        self._end = ctx.clock() + order.context.deadline_seconds
        self._is_leased = False
        self._is_told = False

    def fail(self, event: RequestFailed) -> None:
        """The schedule has removed the request. Older events in the inbox name slots that are
        gone."""
        while not self.inbox.empty():
            self.inbox.get_nowait()
        self.inbox.put_nowait(event)

    @abstractmethod
    def refuse(self, reservation_id: str) -> None:
        """Decode gave up a reservation, perhaps before its answer to Reserve has arrived."""

    async def run(self, position: int) -> None:
        """Runs from the queue to the hand-off, within the deadline. Raises the error that ended
        it."""
        forks = list(self.order.request.fork_points)
        self._say("queued", position=position, **({"forks": forks} if forks else {}))
        self.progress.put_nowait(values.PrefillQueued())
        try:
            async with (
                asyncio.timeout(self.order.context.deadline_seconds),
                self._ctx.run_limit,
                self._leased() as lease,
            ):
                await memory_ready(self._ctx.engine, self.order.request.prompt_len)
                await self._run(lease)
        except asyncio.CancelledError:
            self._say_last("cancelled")
            raise
        except TimeoutError as error:
            self._say_last("failed", reason="DeadlineExceeded")
            raise DeadlineExceeded("the deadline passed during prefill") from error
        except Exception as error:
            self._say_last("failed", reason=failure_of(error).reason)
            raise
        finally:
            self.progress.put_nowait(None)

    @abstractmethod
    async def _run(self, lease: HostLease) -> None:
        """Computes the prompt and says `handed_off`, with the units of the host tier at hand."""

    @property
    def _request(self) -> Request:
        """The request by the name of this attempt, as the schedule knows it."""
        return replace(self.order.request, request_id=self.name)

    # The host tier.

    @asynccontextmanager
    async def _leased(self) -> AsyncIterator[HostLease]:
        brought = await self._prefetched()
        lease = await self._ctx.host.lease_for(self.order.request, self._tags, brought)
        lease = replace(lease, view=replace(lease.view, unlike_pages=self.order.unlike_pages))
        self._is_leased = True
        try:
            yield lease
        finally:
            self._release(lease)

    async def _prefetched(self) -> Prefetched:
        """Has slower tiers bring units into the host tier, if enough could be gained."""
        host, request = self._ctx.host, self.order.request
        if not host.wants_prefetch(request):
            return NOTHING_BROUGHT
        self._say("prefetching", prompt_len=request.prompt_len)
        seconds_left = self._end - self._ctx.clock()
        brought = await host.prefetch(request, self._tags, seconds_left=seconds_left)
        page_size = self._ctx.engine.manifest.page_size
        self._say("prefetched", **prefetch_facts(brought, page_size))
        self._ctx.cache_metrics.prefetched(brought)
        return brought

    def _release(self, lease: HostLease, *, was_corrupt: bool = False) -> None:
        """Releases the lease once: as soon as the loads are done, or when the attempt ends without
        any."""
        if self._is_leased:
            self._is_leased = False
            self._ctx.host.release(lease, was_corrupt=was_corrupt)

    # The schedule.

    def _leave_schedule(self) -> None:
        """Frees everything held here, except slots that are being sent."""
        self._ctx.engine.scheduler.cancel(self.name, self._ctx.clock())
        self._ctx.wake.set()

    async def _computed(self, lease: HostLease, up_to: Callable[[int], None]) -> Sampled:
        """Follows the schedule's events until the first token is drawn, and returns it. `up_to` is
        told how many positions are computed or reused."""
        page_size = self._ctx.engine.manifest.page_size
        plan: ResumePlan | None = None
        while True:
            match await self.inbox.get():
                case SequenceAdmitted(plan=plan):
                    self._admitted(plan)
                    up_to(plan.anchor_pages * page_size)
                case ChunkDone() as chunk:
                    self._chunk(chunk)
                    up_to(chunk.end)
                case PromptScored(scores=scores):
                    for piece in scores.pieces():
                        self.progress.put_nowait(piece)
                case LoadsDone():
                    self._release(lease)
                case LoadCorrupt():
                    self._release(lease, was_corrupt=True)
                case SequenceHeld(first=first) | Drawn(sampled=first):
                    assert plan is not None, "a prompt that is computed has been admitted"
                    # The last plan counts: a corrupt load causes a new plan.
                    self._ctx.cache_metrics.planned(plan)
                    return first
                case RequestFailed(error=error):
                    raise error
                case Finished():
                    raise Cancelled("the prompt was given up by this worker")

    def _admitted(self, plan: ResumePlan) -> None:
        manifest = self._ctx.engine.manifest
        self._ctx.host.planned(self._request, plan, self._tags)
        self._usage = prompt_usage(manifest, plan)
        self._say("admitted", **plan_facts(manifest, plan))
        self.progress.put_nowait(values.PrefillAdmitted(self._usage))

    def _chunk(self, chunk: ChunkDone) -> None:
        self._num_chunks += 1
        step_tokens = self._ctx.engine.scheduler.limits.chunk_tokens
        left = -(-(chunk.prompt_len - chunk.end) // step_tokens)
        index, count = self._num_chunks, self._num_chunks + left
        self._say("chunk", index=index, count=count, start=chunk.start, end=chunk.end)
        self.progress.put_nowait(values.PrefillChunkDone(chunk.end))

    # The lifecycle log.

    def _say_last(self, event: str, **facts: Fact) -> None:
        """Reports only the first end of an attempt."""
        if not self._is_told:
            self._is_told = True
            self._say(event, **facts)

    def _say(self, event: str, **facts: Fact) -> None:
        context = self.order.context
        self._ctx.lifecycle.publish(
            context.request_id, context.attempt, event, traceparent=context.traceparent, **facts
        )
