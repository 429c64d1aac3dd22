"""A worker's connection to its node's host-cache: attaches again whenever it is lost.

An absent, slow or new host-cache is ordinary: `link` is None then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import Any

import grpc.aio

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import StateManifest
from ferryman.errors import (
    DeadlineExceeded,
    FerrymanError,
    LeaseLost,
    ManifestMismatch,
    Stale,
    Unavailable,
)
from ferryman.security.tls import PLAINTEXT, ChannelSecurity
from ferryman.tiers.prefetch_values import DEFAULT_WISH, PrefetchOptions
from ferryman.tiers.write_policy import UnitKey
from ferryman.wire.codec.scalars import keys_to_bytes, kind_to_wire
from ferryman.wire.grpc.role_tokens import NO_TOKEN
from ferryman.wire.grpc.rpc import CallTags, channel
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.hostcache.arena import MappedArena
from ferryman.wire.v1 import hostcache_pb2 as pb
from ferryman.wire.v1 import types_pb2
from ferryman.wire.v1.hostcache_pb2_grpc import HostCacheServiceStub

log = logging.getLogger(__name__)

ATTACH_SECONDS = 5.0
MIN_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 2.0
MAX_WAITING_RELEASES = 4096
# Limits of one message: a lease of a long prompt may name thousands of corrupt units.
MAX_RELEASES, MAX_CORRUPT_NAMES, MAX_DROPPED_CHAINS = 256, 32_768, 256
RENEWALS_PER_LEASE = 3

OnAttach = Callable[[memoryview], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class HostCacheOptions:
    """The address of the node's host-cache, and the worker's own identity. A call that takes longer
    than `call_seconds` is a miss; stores beyond `max_stores` at once are dropped. A prefetch may
    take longer, as long as its caller allows; `prefetch` has its options. `token` proves a role."""

    address: str
    worker_id: str
    worker_epoch: int
    call_seconds: float = 0.2
    max_stores: int = 8
    prefetch: PrefetchOptions = DEFAULT_WISH
    token: str = field(default=NO_TOKEN, repr=False)
    security: ChannelSecurity = PLAINTEXT


@dataclass(frozen=True, slots=True)
class Link:
    """One attachment to one life of the host-cache."""

    epoch: int
    node_id: str
    lease_seconds: float
    arena: MappedArena


@dataclass(frozen=True, slots=True)
class ReleaseNote:
    """A lease that has ended, and its units whose bytes did not have their digest."""

    epoch: int
    lease_id: str
    corrupt: tuple[UnitKey, ...] = ()


def first_of(releases: Sequence[ReleaseNote]) -> Sequence[ReleaseNote]:
    """The first releases that fit into one message, at least one."""
    names = accumulate(len(note.corrupt) for note in releases[:MAX_RELEASES])
    return releases[: max(1, sum(number <= MAX_CORRUPT_NAMES for number in names))]


class HostAttachment:
    """Keeps a link, renews the leases held, and releases the others. `run` does the work."""

    def __init__(
        self, options: HostCacheOptions, manifest: StateManifest, on_attach: OnAttach
    ) -> None:
        self._options, self._manifest, self._on_attach = options, manifest, on_attach
        self._channel: grpc.aio.Channel = channel(options.address, options.token, options.security)
        self.stub = HostCacheServiceStub(self._channel)
        self._link: Link | None = None
        self._is_suspect = False
        self._last_trouble = ""
        self._held: dict[str, int] = {}
        self._releases: list[ReleaseNote] = []
        self._dropped_chains: dict[PageKey, int] = {}  # how often each is to be reported
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._numbers = count(1)
        self.num_failures = 0
        self.num_attaches = 0
        self.num_times_usable = 0  # by an attachment, or after a call that had no answer
        self.num_lost_leases = 0

    @property
    def link(self) -> Link | None:
        """The link, unless there is none or the last call over it failed."""
        return None if self._is_suspect else self._link

    async def attached(self) -> Link:
        """Waits for a link; the caller sets the time limit."""
        while (link := self.link) is None:
            self._changed.clear()
            await self._changed.wait()
        return link

    async def usable_since(self, num_times: int) -> int:
        """Waits until the link has become usable once more than so many times; returns how many.
        Waits for ever if it never does."""
        while self.link is None or self.num_times_usable == num_times:
            self._changed.clear()
            await self._changed.wait()
        return self.num_times_usable

    async def released(self) -> None:
        """Waits until the host-cache has received all reports; the caller sets the time limit."""
        while self._releases or self._dropped_chains:
            self._changed.clear()
            await self._changed.wait()

    # Reports of the link's users.

    def hold(self, lease_id: str, link: Link) -> None:
        """Renews this lease until it is released."""
        self._held[lease_id] = link.epoch

    def release(self, lease_id: str, epoch: int, corrupt: Iterable[UnitKey] = ()) -> None:
        """Gives a lease back soon, also one whose grant never arrived."""
        self._held.pop(lease_id, None)
        is_void = self._link is not None and self._link.epoch != epoch
        if not is_void and len(self._releases) < MAX_WAITING_RELEASES:
            self._releases.append(ReleaseNote(epoch, lease_id, tuple(corrupt)))
            self._wake.set()

    def drop_chain(self, first: PageKey) -> None:
        """Reports state that no tier may keep, soon. Also reports to a host-cache that is away now,
        because its disk still has the state after its restart."""
        if len(self._dropped_chains) < MAX_DROPPED_CHAINS:
            self._dropped_chains[first] = self._dropped_chains.get(first, 0) + 1
            self._wake.set()

    def forget(self, lease_id: str) -> None:
        """The lease ended by itself, because it was committed."""
        self._held.pop(lease_id, None)

    def new_lease_id(self) -> str:
        """A name that no lease of this or another worker ever had."""
        options = self._options
        return f"{options.worker_id}.{options.worker_epoch:x}.{next(self._numbers)}"

    async def call(
        self, method: Callable[..., Any], request: object, link: Link, *, patience: float = 0.0
    ) -> Any:
        """Makes one rpc within `call_seconds`, in addition to the `patience` that the request
        names; records a FerrymanError and raises it."""
        try:
            with typed_errors():
                seconds, proof = patience + self._options.call_seconds, link.arena.proof
                return await method(request, timeout=seconds, metadata=proof)
        except FerrymanError as error:
            self._failed(error, link)
            raise

    def _failed(self, error: FerrymanError, link: Link) -> None:
        """A call over `link` failed. After a call without any answer the link is not used until one
        comes."""
        self.num_failures += 1
        if link is not self._link:
            return
        if isinstance(error, Unavailable | DeadlineExceeded):
            self._is_suspect = True
            self._wake.set()
        elif isinstance(error, Stale) and not isinstance(error, LeaseLost):
            self._drop()
            self._wake.set()

    # The work of `run`.

    async def run(self) -> None:
        """Attaches, renews, releases; for ever."""
        retry = MIN_RETRY_SECONDS
        while True:
            try:
                link = self._link or await self._attach()
                await self._renew(link)
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
            self._wake.clear()  # reports cannot be sent before the next try
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
        """The host-cache is another process now: leases of the old one are void, its arena stays
        mapped."""
        self._link = None
        self._held.clear()

    async def _attach(self) -> Link:
        request = pb.AttachRequest(
            worker_id=self._options.worker_id,
            worker_epoch=self._options.worker_epoch,
            manifest_digest=self._manifest.digest,
            manifest_json=self._manifest.text,
        )
        with typed_errors():
            answer = await self.stub.Attach(request, timeout=ATTACH_SECONDS)
        arena = await asyncio.to_thread(
            MappedArena, answer.arena_path, answer.arena_bytes, answer.liveness_offset
        )
        await self._hand_over(arena)
        self._releases = [note for note in self._releases if note.epoch == answer.epoch]
        link = Link(answer.epoch, answer.node_id, answer.lease_ms / 1000, arena)
        self._link = link
        self.num_attaches += 1
        self.num_times_usable += 1
        log.info("attached node=%s epoch=%d arena=%s", answer.node_id, answer.epoch, arena.path)
        return link

    async def _hand_over(self, arena: MappedArena) -> None:
        """Gives a device the arena; one that it does not take is unmapped, so that its memory goes
        back when the host-cache ends."""
        view = arena.memory[:]
        try:
            await self._on_attach(view)
        except BaseException:
            with suppress(BufferError):  # a part of it is in use: then the last view unmaps it
                view.release()
            arena.close()
            raise

    async def _renew(self, link: Link) -> None:
        """Renews all leases. It is also the probe after which a suspect link is used again."""
        request = pb.HostCacheServiceRenewRequest(epoch=link.epoch, lease_ids=self._held)
        with typed_errors():
            seconds, proof = self._options.call_seconds, link.arena.proof
            answer = await self.stub.Renew(request, timeout=seconds, metadata=proof)
        for lease_id in answer.lost:
            self.num_lost_leases += self._held.pop(lease_id, None) is not None
        self.num_times_usable += self._is_suspect
        self._last_trouble, self._is_suspect = "", False
        self._changed.set()

    async def _send_releases(self) -> None:
        while (self._releases or self._dropped_chains) and self._link:
            sent, dropped = first_of(self._releases), dict(self._dropped_chains)
            proof = self._link.arena.proof
            request = pb.ReleaseRequest(
                epoch=self._link.epoch,
                lease_ids=[note.lease_id for note in sent],
                corrupt=[
                    pb.UnitName(kind=kind_to_wire(kind), key=key)
                    for note in sent
                    for kind, key in note.corrupt
                ],
                dropped_chains=keys_to_bytes(dropped),
            )
            with typed_errors():
                await self.stub.Release(request, timeout=ATTACH_SECONDS, metadata=proof)
            del self._releases[: len(sent)]
            for first, times in dropped.items():
                if self._dropped_chains[first] == times:  # else it was reported again meanwhile
                    del self._dropped_chains[first]
        self._changed.set()

    async def close(self) -> None:
        """Releases leases; if that fails, the file lock shows the host-cache that we are gone."""
        for lease_id, epoch in tuple(self._held.items()):
            self.release(lease_id, epoch)
        if self.link:
            with suppress(FerrymanError, TimeoutError):
                async with asyncio.timeout(self._options.call_seconds):
                    await self._send_releases()
        await self._channel.close()
        if self._link:
            self._link.arena.close()


def context_of(tags: CallTags) -> types_pb2.RequestContext:
    """The request of a call, for the host-cache's lifecycle log."""
    return types_pb2.RequestContext(
        request_id=tags.request_id, attempt=tags.attempt, traceparent=tags.traceparent
    )
