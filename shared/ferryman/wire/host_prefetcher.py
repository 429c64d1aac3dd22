"""Prefetching from a worker's side: ask the host-cache to bring, and perhaps wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ferryman.cache.keys import PageKey
from ferryman.errors import FerrymanError
from ferryman.tiers.prefetch_values import NOTHING_BROUGHT, Prefetched
from ferryman.wire.codec.prefetch import policy_to_wire, prefetched_from_wire
from ferryman.wire.codec.scalars import keys_to_bytes, milliseconds
from ferryman.wire.host_attachment import HostAttachment, HostCacheOptions, context_of
from ferryman.wire.rpc import CallTags
from ferryman.wire.v1 import hostcache_pb2 as pb


@dataclass(frozen=True, slots=True)
class Wanted:
    """A prompt whose prefix is to be brought; the device can resume from `have_pages` of it."""

    keys: Sequence[PageKey]
    prompt_len: int
    have_pages: int


class HostPrefetcher:
    """The prefetching half of a client. Whatever fails brings nothing."""

    def __init__(
        self, attachment: HostAttachment, options: HostCacheOptions, page_size: int
    ) -> None:
        self._attachment, self._options, self._page_size = attachment, options, page_size
        self.num_prefetches = self.num_failures = 0

    async def begin(self, wanted: Wanted, *, tags: CallTags, patience: float) -> Prefetched:
        """Answers at once, with what is known so far."""
        request = self._request(wanted, tags, patience)
        request.phase = pb.PREFETCH_PHASE_START
        return await self._call(request, 0.0)

    async def finish(self, wanted: Wanted, *, tags: CallTags, patience: float) -> Prefetched:
        """Answers when the policy says."""
        request = self._request(wanted, tags, patience)
        request.phase = pb.PREFETCH_PHASE_FINISH
        return await self._call(request, patience)

    def _request(self, wanted: Wanted, tags: CallTags, patience: float) -> pb.PrefetchRequest:
        wish, context = self._options.prefetch, context_of(tags)
        context.deadline_ms = milliseconds(patience)
        return pb.PrefetchRequest(
            context=context,
            page_keys=keys_to_bytes(wanted.keys),
            have_pages=wanted.have_pages,
            max_pages=max(0, wanted.prompt_len - 1) // self._page_size,
            policy=policy_to_wire(wish.policy),
            threshold_tokens=wish.threshold_tokens,
        )

    async def _call(self, request: pb.PrefetchRequest, patience: float) -> Prefetched:
        link = self._attachment.link
        if link is None or not request.page_keys:
            return NOTHING_BROUGHT
        self.num_prefetches += 1
        request.epoch = link.epoch
        method = self._attachment.stub.Prefetch
        try:
            answer = await self._attachment.call(method, request, link, patience=patience)
        except FerrymanError:
            self.num_failures += 1
            return NOTHING_BROUGHT
        return prefetched_from_wire(answer)
