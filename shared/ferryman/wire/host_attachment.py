"""A worker's tie to its node's host-cache: attached, lost, attached again, for as long as it lives.

The host-cache being away, slow or new is ordinary. Whoever uses it asks `link` and gets None.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Any

import grpc.aio

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest, manifest_to_json
from ferryman.errors import (
    DeadlineExceeded,
    FerrymanError,
    LeaseLost,
    ManifestMismatch,
    Stale,
    Unavailable,
)
from ferryman.tiers.prefetch_values import DEFAULT_WISH, PrefetchWish
from ferryman.wire.codec.scalars import kind_to_wire
from ferryman.wire.host_arena import MappedArena
from ferryman.wire.rpc import CallTags, channel
from ferryman.wire.status import typed_errors
from ferryman.wire.v1 import hostcache_pb2 as pb
from ferryman.wire.v1 import types_pb2
from ferryman.wire.v1.hostcache_pb2_grpc import HostCacheServiceStub

log = logging.getLogger(__name__)

ATTACH_SECONDS = 5.0
MIN_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 2.0
MAX_WAITING_RELEASES = 4096
# Of one message: a lease of a long prompt may name thousands of units that are corrupt.
MAX_RELEASES, MAX_CORRUPT_NAMES = 256, 32_768
RENEWALS_PER_LEASE = 3

OnAttach = Callable[[memoryview], Awaitable[None]]
UnitName = tuple[Kind, PageKey]


@dataclass(frozen=True, slots=True)
class HostCacheOptions:
    """Where the node's host-cache is and who asks. Whatever takes longer than `call_seconds` is a
    miss; stores beyond `max_stores` at once are dropped. A prefetch may take longer: its caller
    says how long, `prefetch` what for."""

    address: str
    worker_id: str
    worker_epoch: int
    call_seconds: float = 0.2
    max_stores: int = 8
    prefetch: PrefetchWish = DEFAULT_WISH


@dataclass(frozen=True, slots=True)
class Link:
    """One attachment to one life of the host-cache."""

    epoch: int
    node_id: str
    lease_seconds: float
    arena: MappedArena


@dataclass(frozen=True, slots=True)
class ReleaseNote:
    """A lease that is over, and the units under it whose bytes did not have their digest."""

    epoch: int
    lease_id: str
    corrupt: tuple[UnitName, ...] = ()


def first_of(releases: Sequence[ReleaseNote]) -> Sequence[ReleaseNote]:
    """As many as go into one message, one at least."""
    names = accumulate(len(each.corrupt) for each in releases[:MAX_RELEASES])
    return releases[: max(1, sum(number <= MAX_CORRUPT_NAMES for number in names))]


class HostAttachment:
    """Keeps a link, renews what is held, and gives back what is not. `run` does the work."""

    def __init__(
        self, options: HostCacheOptions, manifest: StateManifest, on_attach: OnAttach
    ) -> None:
        self._options, self._manifest, self._on_attach = options, manifest, on_attach
        self._channel: grpc.aio.Channel = channel(options.address)
        self.stub = HostCacheServiceStub(self._channel)
        self._links: list[Link] = []  # none or one
        self._is_suspect = False
        self._last_trouble = ""
        self._held: dict[str, int] = {}
        self._releases: list[ReleaseNote] = []
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._numbers = count(1)
        self.num_failures = 0
        self.num_attaches = 0
        self.num_lost_leases = 0

    @property
    def link(self) -> Link | None:
        """The link, unless there is none or the last call over it failed."""
        return self._links[0] if self._links and not self._is_suspect else None

    async def attached(self) -> Link:
        """Wait for a link; the caller says how long."""
        while (link := self.link) is None:
            self._changed.clear()
            await self._changed.wait()
        return link

    async def released(self) -> None:
        """Wait until the host-cache has heard of every release; the caller says how long."""
        while self._releases:
            self._changed.clear()
            await self._changed.wait()

    # What users of a link report.

    def hold(self, lease_id: str, link: Link) -> None:
        """Renew this lease until it is released."""
        self._held[lease_id] = link.epoch

    def release(self, lease_id: str, epoch: int, corrupt: Iterable[UnitName] = ()) -> None:
        """Give a lease back, soon; also one whose grant was never seen."""
        self._held.pop(lease_id, None)
        is_void = bool(self._links) and self._links[0].epoch != epoch
        if not is_void and len(self._releases) < MAX_WAITING_RELEASES:
            self._releases.append(ReleaseNote(epoch, lease_id, tuple(corrupt)))
            self._wake.set()

    def forget(self, lease_id: str) -> None:
        """The lease ended by itself: it was committed."""
        self._held.pop(lease_id, None)

    def new_lease_id(self) -> str:
        """A name that no lease of this or another worker ever had."""
        options = self._options
        return f"{options.worker_id}.{options.worker_epoch:x}.{next(self._numbers)}"

    async def call(
        self, method: Callable[..., Any], request: object, link: Link, *, patience: float = 0.0
    ) -> Any:
        """One rpc within `call_seconds`, beyond the `patience` that the host-cache was told of; a
        FerrymanError is noted and raised."""
        try:
            with typed_errors():
                return await method(request, timeout=patience + self._options.call_seconds)
        except FerrymanError as error:
            self._failed(error, link)
            raise

    def _failed(self, error: FerrymanError, link: Link) -> None:
        """A call over `link` failed; without any answer it counts as no link until one comes."""
        self.num_failures += 1
        if link not in self._links:
            return
        if isinstance(error, Unavailable | DeadlineExceeded):
            self._is_suspect = True
            self._wake.set()
        elif isinstance(error, Stale) and not isinstance(error, LeaseLost):
            self._drop()
            self._wake.set()

    # The work.

    async def run(self) -> None:
        """Attach, renew, release; forever."""
        retry = MIN_RETRY_SECONDS
        while True:
            try:
                if not self._links:
                    await self._attach()
                await self._renew()
                await self._send_releases()
                retry = MIN_RETRY_SECONDS
            except FerrymanError as error:
                self._note(error)
                retry = min(2 * retry, MAX_RETRY_SECONDS)
            await self._pause(retry)

    async def _pause(self, retry: float) -> None:
        link = self.link
        seconds = link.lease_seconds / RENEWALS_PER_LEASE if link else retry
        if link is None:
            self._wake.clear()  # what waits cannot be sent before the next try
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        self._wake.clear()

    def _note(self, error: FerrymanError) -> None:
        if self._last_trouble != (trouble := f"{error.reason}: {error}"):
            level = logging.WARNING if isinstance(error, ManifestMismatch) else logging.INFO
            log.log(level, "no host-cache address=%s: %s", self._options.address, trouble)
        self._last_trouble, self._is_suspect = trouble, True
        if isinstance(error, Stale):
            self._drop()

    def _drop(self) -> None:
        """The host-cache is another now: leases of the old one are void, its arena stays mapped."""
        self._links.clear()
        self._held.clear()

    async def _attach(self) -> None:
        request = pb.AttachRequest(
            worker_id=self._options.worker_id,
            worker_epoch=self._options.worker_epoch,
            manifest_digest=self._manifest.digest,
            manifest_json=manifest_to_json(self._manifest),
        )
        with typed_errors():
            answer = await self.stub.Attach(request, timeout=ATTACH_SECONDS)
        arena = await asyncio.to_thread(
            MappedArena, answer.arena_path, answer.arena_bytes, answer.liveness_offset
        )
        await self._on_attach(arena.memory[:])
        self._releases = [each for each in self._releases if each.epoch == answer.epoch]
        self._links[:] = [Link(answer.epoch, answer.node_id, answer.lease_ms / 1000, arena)]
        self.num_attaches += 1
        log.info("attached node=%s epoch=%d arena=%s", answer.node_id, answer.epoch, arena.path)

    async def _renew(self) -> None:
        """Also the probe by which a suspect link becomes good again."""
        link = self._links[0]
        request = pb.HostCacheServiceRenewRequest(epoch=link.epoch, lease_ids=self._held)
        with typed_errors():
            answer = await self.stub.Renew(request, timeout=self._options.call_seconds)
        for lease_id in answer.lost:
            self.num_lost_leases += self._held.pop(lease_id, None) is not None
        self._last_trouble, self._is_suspect = "", False
        self._changed.set()

    async def _send_releases(self) -> None:
        while self._releases and self._links:
            sent = first_of(self._releases)
            request = pb.ReleaseRequest(
                epoch=self._links[0].epoch,
                lease_ids=[each.lease_id for each in sent],
                corrupt=[
                    pb.UnitName(kind=kind_to_wire(kind), key=key)
                    for each in sent
                    for kind, key in each.corrupt
                ],
            )
            with typed_errors():
                await self.stub.Release(request, timeout=ATTACH_SECONDS)
            del self._releases[: len(sent)]
        self._changed.set()

    async def close(self) -> None:
        """Say goodbye; what is not said, the lock says."""
        for lease_id, epoch in tuple(self._held.items()):
            self.release(lease_id, epoch)
        if self.link:
            with suppress(FerrymanError, TimeoutError):
                async with asyncio.timeout(self._options.call_seconds):
                    await self._send_releases()
        await self._channel.close()
        for link in self._links:
            link.arena.close()


def context_of(tags: CallTags) -> types_pb2.RequestContext:
    """For whom a call is, for the host-cache's lifecycle log."""
    return types_pb2.RequestContext(
        request_id=tags.request_id, attempt=tags.attempt, traceparent=tags.traceparent
    )
