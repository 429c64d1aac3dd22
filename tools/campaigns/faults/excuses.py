"""The failures of calls that a fault explains. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tools.campaigns.faults.callers import CallOutcome, Verdict
from tools.campaigns.faults.conditions import Interval

NEVER = (Verdict.CUT, Verdict.WRONG, Verdict.HUNG, Verdict.UNTYPED)
NO_REPLICA = "a role had no replica left"
ITS_ROUTER_DIED = "the router that had the connection was killed"


def excuse(
    outcome: CallOutcome,
    unserved_by: Mapping[str, Sequence[Interval]],
    deaths: Mapping[str, Sequence[Interval]],
) -> str | None:
    """Why a call that failed may have failed; None: it must not have.

    `unserved_by` is when a router (of all, under the empty name) could not serve, `deaths` the time
    from each kill of a router until it was back. Callers of a router's own cannot know of another.
    """
    if outcome.verdict in NEVER:
        return None
    router = f"router-{outcome.router}" if outcome.router else ""
    its_deaths = deaths.get(router, ())
    if outcome.verdict is Verdict.CONNECTION and router:
        # A killed router ends each connection at that moment; no other absence ends any.
        was_dead = any(outcome.during.overlaps(one) for one in its_deaths)
        return ITS_ROUTER_DIED if was_dead else None
    if any(one.contains(outcome.during.end) for one in unserved_by.get(router, ())):
        return NO_REPLICA
    return None
