"""What a prefill worker, and the host-cache of its node, are told to do. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ferryman.cache.keys import PageKey
from ferryman.schedule.request import Request
from ferryman.wire.beats import Beat
from ferryman.wire.values import PrefillOrder, RequestContext, WorkerAddress
from ferryman_router.asked import Asked
from ferryman_router.chains import Chains


@dataclass(frozen=True, slots=True)
class PrefetchOrder:
    """To a life of a host-cache: begin to bring what is worth it of `keys`, for a worker that can
    resume from `have_pages` of them by itself."""

    context: RequestContext
    epoch: int
    keys: Sequence[PageKey]
    have_pages: int
    max_pages: int


def prefetch_order(host: Beat, order: PrefillOrder, have_tokens: int) -> PrefetchOrder:
    """What the worker will need of its host-cache soon; joined to its own call by the attempt."""
    page_size = host.state.page_size
    keys = order.request.keys
    most = max(0, len(order.request.token_ids) - 1) // page_size
    return PrefetchOrder(order.context, host.epoch, keys, have_tokens // page_size, most)


def prefill_order(
    asked: Asked, chains: Chains, *, pair: tuple[Beat, Beat], attempt: int, router: str, now: float
) -> PrefillOrder:
    """The order of one attempt: all tokens there are, those generated at the end.

    `pair` is the prefill worker spoken to and the decode worker that shall go on.
    """
    prefill, decode = pair
    request = Request(
        asked.request_id,
        chains.token_ids,
        chains.of(decode.state),
        asked.params,
        asked.stop_token_ids,
        num_generated=len(chains.token_ids) - asked.prompt_len,
    )
    context = RequestContext(
        asked.request_id,
        attempt,
        deadline_seconds=max(0.0, asked.deadline - now),
        age_seconds=now - asked.arrived,
        traceparent=asked.caller.traceparent,
        tenant_salt=asked.tenant.salt,
    )
    address = WorkerAddress(decode.worker_id, decode.address, decode.epoch)
    return PrefillOrder(context, prefill.epoch, address, router, request, prefill.state.digest)
