"""Prefetching from a worker's side: ask the host-cache to bring, and perhaps wait for it."""

from __future__ import annotations

from collections.abc import Sequence

from ferryman.cache.keys import PageKey
from ferryman.errors import FerrymanError
from ferryman.tiers.prefetch_values import NOTHING_BROUGHT, Prefetched
from ferryman.wire.codec.prefetch import policy_to_wire, prefetched_from_wire
from ferryman.wire.codec.scalars import keys_to_bytes, milliseconds
from ferryman.wire.host_attachment import HostAttachment, HostCacheOptions, context_of
from ferryman.wire.rpc import CallTags
from ferryman.wire.v1 import hostcache_pb2 as pb


class HostPrefetcher:
    """The prefetching half of a client. Whatever fails brings nothing."""

    def __init__(
        self, attachment: HostAttachment, options: HostCacheOptions, page_size: int
    ) -> None:
        self._attachment, self._options, self._page_size = attachment, options, page_size
        self.num_prefetches = self.num_failures = 0

    async def prefetch(
        self,
        keys: Sequence[PageKey],
        prompt_len: int,
        *,
        have_pages: int,
        tags: CallTags,
        patience: float,
    ) -> Prefetched:
        """Answers when the policy says. The device can resume from `have_pages` of the prompt."""
        link = self._attachment.link
        if link is None or not keys:
            return NOTHING_BROUGHT
        self.num_prefetches += 1
        wish, context = self._options.prefetch, context_of(tags)
        context.deadline_ms = milliseconds(patience)
        request = pb.PrefetchRequest(
            epoch=link.epoch,
            context=context,
            page_keys=keys_to_bytes(keys),
            have_pages=have_pages,
            max_pages=max(0, prompt_len - 1) // self._page_size,
            policy=policy_to_wire(wish.policy),
            threshold_tokens=wish.threshold_tokens,
            phase=pb.PREFETCH_PHASE_FINISH,
        )
        method = self._attachment.stub.Prefetch
        try:
            answer = await self._attachment.call(method, request, link, patience=patience)
        except FerrymanError:
            self.num_failures += 1
            return NOTHING_BROUGHT
        return prefetched_from_wire(answer)
