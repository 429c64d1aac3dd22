"""What a prefill worker is told to do. Pure."""

from __future__ import annotations

from ferryman.schedule.request import Request
from ferryman.wire.beats import Beat
from ferryman.wire.values import PrefillOrder, RequestContext, WorkerAddress
from ferryman_router.asked import Asked
from ferryman_router.chains import Chains


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
