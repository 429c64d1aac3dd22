"""The numeric watch: a worker whose model computes no finite numbers reports it and drains.

One such request may be the request's fault: a prompt on which a narrow dtype overflows. From the
second on the worker is taken to be faulty: broken weights, broken memory, a broken card. It drains,
so that its good requests end normally, and its process ends with status 1, so that its supervisor
starts it anew.

If a request reused state, that state may be faulty: it is dropped, and the failure does not count
against the worker. But when this drops chain after chain, the worker is faulty, because the chains
cannot all have been bad.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from ferryman.errors import NonFiniteLogits, NonFiniteState
from ferryman.schedule.events import ChainDropped, RequestFailed

log = logging.getLogger(__name__)

MAX_REQUESTS = 2
# The limit for requests that reused state; each of them dropped another chain.
MAX_REUSING = 16


@dataclass(frozen=True, slots=True)
class NumericCounts:
    """Requests that ended because their logits were not finite: computed here alone, and from
    reused state, which was dropped."""

    num_non_finite: int
    num_non_finite_reused: int


class NumericWatch:
    """Names this worker in such errors, counts the requests, and calls `drain` when they are too
    many.

    Attempts of one request count once: a router without another worker tries it here again.
    """

    def __init__(self, worker_id: str, drain: Callable[[], None]) -> None:
        self._worker_id, self._drain = worker_id, drain
        self._requests: set[str] = set()
        self._reusing: set[str] = set()

    def statistics(self) -> NumericCounts:
        return NumericCounts(len(self._requests), len(self._reusing))

    def on_chain_dropped(self, event: ChainDropped) -> None:
        if event.was_reused:
            self._blame(event.request_id, self._reusing)

    def on_failure(self, event: RequestFailed) -> RequestFailed:
        """The same event, with this worker's name in an error of this kind."""
        match event.error:
            case NonFiniteLogits() as error:
                self._blame(event.request_id, self._requests)
                return replace(event, error=NonFiniteLogits(f"{self._worker_id}: {error}"))
            case NonFiniteState() as error:
                return replace(event, error=NonFiniteState(f"{self._worker_id}: {error}"))
        return event

    def check(self) -> None:
        """Raises NonFiniteLogits once this worker counts as broken."""
        if self._is_broken:
            raise NonFiniteLogits(
                f"{self._worker_id}: the logits of {len(self._requests | self._reusing)} requests "
                f"were no finite numbers; its weights, its memory or its device are broken"
            )

    @property
    def _is_broken(self) -> bool:
        return len(self._requests) >= MAX_REQUESTS or len(self._reusing) >= MAX_REUSING

    def _blame(self, name: str, requests: set[str]) -> None:
        was_broken = self._is_broken
        requests.add(name.rpartition(".")[0])
        if self._is_broken and not was_broken:
            suspects = ",".join(sorted(self._requests | self._reusing))
            log.error("taking this worker out requests=%s", suspects)
            self._drain()
