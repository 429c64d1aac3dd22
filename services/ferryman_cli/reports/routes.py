"""The reasons for a route in words: the prediction, and by how much it won."""

from __future__ import annotations

from collections.abc import Iterator

from ferryman.client import RouteCandidate, RouteExplanation
from ferryman_cli.reports.phrases import counted, duration, tier_words
from ferryman_cli.reports.request_summary import RequestSummary, SummaryLine


def route_summary(request_id: str, route: RouteExplanation) -> RequestSummary:
    """The headline has the choice, its lines the parts of the prediction and the runner-up."""
    chosen = route.chosen
    where = chosen.prefill_worker_id
    if chosen.decode_worker_id != where:
        where += f" and {chosen.decode_worker_id}"
    attempt = f", attempt {route.attempt}," if route.attempt > 1 else ""
    return RequestSummary(f"{request_id}{attempt} went to {where}", tuple(_lines(route)))


def _lines(route: RouteExplanation) -> Iterator[SummaryLine]:
    chosen = route.chosen
    yield "because", _because(route)
    total = duration(chosen.total_seconds * 1000)
    yield "predicted", f"{total} to the first token: {_parts(chosen)}"
    yield "kept", _kept(chosen)
    if chosen.unlike_tokens:
        tokens = counted(chosen.unlike_tokens, "token")
        yield "not used", f"{tokens} that are kept in another arithmetic"
    promise = "the bits of a cold run" if chosen.exactness.value == "bits" else "equal values"
    yield "hand-off", f"by {chosen.plane or 'nothing'}; promises {promise}"


def _because(route: RouteExplanation) -> str:
    if not route.others:
        return "no other pair of workers could take it"
    best = route.others[0]
    slower = duration((best.total_seconds - route.chosen.total_seconds) * 1000)
    where = best.prefill_worker_id
    if best.decode_worker_id not in (where, route.chosen.decode_worker_id):
        where += f" and {best.decode_worker_id}"
    kept = best.usable_tokens - route.chosen.usable_tokens
    has = f", though it keeps {counted(kept, 'token')} more" if kept > 0 else ""
    others = f" of {len(route.others)} others" if len(route.others) > 1 else ""
    return f"it is {slower} quicker than the next{others}, {where}{has}"


def _parts(candidate: RouteCandidate) -> str:
    seconds = {
        "waiting": candidate.queue_seconds,
        "fetching": candidate.fetch_seconds,
        "loading": candidate.load_seconds,
        "computing": candidate.prefill_seconds,
        "hand-off": candidate.handoff_seconds,
        "row at decode": candidate.row_seconds,
    }
    parts = (f"{part} {duration(spent * 1000)}" for part, spent in seconds.items() if spent)
    return ", ".join(parts) or "nothing"


def _kept(candidate: RouteCandidate) -> str:
    tiers = {
        "device": candidate.device_tokens,
        "host": candidate.host_tokens,
        "storage": candidate.storage_tokens,
        "peer": candidate.peer_tokens,
    }
    if not candidate.usable_tokens:
        return "no token of its prompt, as far as the router knew"
    return f"{counted(candidate.usable_tokens, 'token')} of its prompt: {tier_words(tiers)}"
