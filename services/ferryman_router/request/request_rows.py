"""Requests in a line each, for the web page: numbers and names, never content.

Rows of requests that ended are kept within bounds, so that a page that is opened later has some to
show. The requests themselves, with their answers, are forgotten after a minute.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ferryman.wire.public import GenerateFinished
from ferryman.wire.values import Usage
from ferryman_router.request.attempt_result import uncached_tokens
from ferryman_router.request.request_runner import RequestRunner
from ferryman_router.request.response import OutputFailed

MAX_ROWS = 512
MAX_ROWS_OF_TENANT = 64


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request. `name` is what its caller calls it. Seconds are monotonic: `arrived`, and when
    it `ended`, 0 while it is under way.

    `end` is empty until then: a finish reason, or the name of an error. `cached` tokens of the
    prompt by tier and `computed` ones by reason are empty before the request was admitted.
    """

    request_id: str
    name: str
    tenant: str
    arrived: float
    stage: str
    attempt: int
    prompt_tokens: int
    answer_tokens: int
    prefill: str
    decode: str
    cached: Mapping[str, int]
    computed: Mapping[str, int]
    end: str = ""
    ended: float = 0.0
    exactness: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.tenant, self.request_id


def row_of(runner: RequestRunner, page_size: int, ended: float = 0.0) -> RequestRow:
    """The row of a request as it is now."""
    asked, attempt, end = runner.asked, runner.attempt, runner.output_log.end
    usage = end.usage if isinstance(end, GenerateFinished) else attempt and attempt.planned
    cached, computed = _tokens(usage, page_size) if usage else ({}, {})
    return RequestRow(
        request_id=asked.request_id,
        name=asked.caller.correlation_id,
        tenant=asked.tenant.name,
        arrived=asked.arrived,
        stage=str(runner.history.state),
        attempt=runner.history.attempt,
        prompt_tokens=asked.prompt_len,
        answer_tokens=runner.output_log.num_tokens,
        prefill=attempt.prefill.worker_id if attempt else "",
        decode=attempt.decode.worker_id if attempt else "",
        cached=cached,
        computed=computed,
        end=_end_of(end),
        ended=ended,
        exactness=end.exactness.value if isinstance(end, GenerateFinished) else "",
    )


def _tokens(usage: Usage, page_size: int) -> tuple[Mapping[str, int], Mapping[str, int]]:
    cached = {tier: tokens for tier, tokens in usage.cached.by_tier.items() if tokens}
    return cached, uncached_tokens(usage, page_size)


def _end_of(end: GenerateFinished | OutputFailed | None) -> str:
    if isinstance(end, OutputFailed):
        return end.error.reason
    return str(end.reason) if end is not None else ""


class EndedRows:
    """The latest rows of each tenant, `MAX_ROWS_OF_TENANT`, and of all together `MAX_ROWS`."""

    def __init__(self, max_rows: int = MAX_ROWS, max_of_tenant: int = MAX_ROWS_OF_TENANT) -> None:
        self._max_rows, self._max_of_tenant = max_rows, max_of_tenant
        # All rows, the latest last; and by tenant the same keys in the same order.
        self._rows: OrderedDict[tuple[str, str], RequestRow] = OrderedDict()
        self._of_tenant: dict[str, OrderedDict[tuple[str, str], None]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: RequestRow) -> None:
        """Keeps a row, and gives up the oldest ones beyond the bounds."""
        self._remove(row.key)
        keys = self._of_tenant.setdefault(row.tenant, OrderedDict())
        self._rows[row.key], keys[row.key] = row, None
        if len(keys) > self._max_of_tenant:
            self._remove(next(iter(keys)))
        if len(self._rows) > self._max_rows:
            self._remove(next(iter(self._rows)))

    def latest_first(self, tenant: str | None) -> Iterator[RequestRow]:
        """The rows of a tenant, or of all."""
        keys = self._rows if tenant is None else self._of_tenant.get(tenant, OrderedDict())
        return (self._rows[key] for key in reversed(keys))

    def get(self, tenant: str | None, request_id: str) -> RequestRow | None:
        """The row of a tenant's request, or of any tenant's."""
        if tenant is not None:
            return self._rows.get((tenant, request_id))
        return next((row for row in self.latest_first(None) if row.request_id == request_id), None)

    def _remove(self, key: tuple[str, str]) -> None:
        if self._rows.pop(key, None) is None:
            return
        keys = self._of_tenant[key[0]]
        del keys[key]
        if not keys:
            del self._of_tenant[key[0]]
