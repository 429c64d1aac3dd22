"""All requests under way, and those that ended lately: a client may come back for them.

A request is found by its own id or by what its caller named it, and by its own tenant alone: no
answer shows a tenant whether another tenant has used an id.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ferryman.errors import InvalidRequest
from ferryman.ids import MAX_REQUEST_ID_LEN, is_request_id, make_request_id
from ferryman.runtime.traces import sibling_traceparent
from ferryman.wire.values import TokenCursor
from ferryman_router.request.attempt import RouterAttempt
from ferryman_router.request.context import RouterContext
from ferryman_router.request.request_rows import EndedRows, row_of
from ferryman_router.request.request_runner import RequestRunner
from ferryman_router.routing.fleet import WorkerName
from ferryman_router.routing.generate_request import PUBLIC, Caller, Tenant
from ferryman_router.routing.routing_policy import takers

MAX_ENDED = 2048
# Requests that leave one draining worker at once; the others go on decoding meanwhile.
MAX_LEAVING = 4
ENDED_SECONDS = 60.0
MAX_NAMES = 1 << 16  # as many as a busy router is given while the lifecycle log keeps their events


class RequestTable:
    """Requests by id: those `under_way`, and for a minute the latest `MAX_ENDED` that ended.
    `ended_rows` are kept longer."""

    def __init__(self) -> None:
        self.under_way: dict[str, RequestRunner] = {}
        self.ended_rows = EndedRows()
        self._ended: OrderedDict[str, tuple[float, RequestRunner]] = OrderedDict()
        self._ids: OrderedDict[tuple[str, str], str] = OrderedDict()  # by tenant and name
        self._taken: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.under_way)

    def __iter__(self) -> Iterator[RequestRunner]:
        return iter(tuple(self.under_way.values()))

    def add(self, runner: RequestRunner) -> None:
        """Raises as `check_free` does."""
        request_id = runner.asked.request_id
        self.check_free(request_id)
        self._ended.pop(request_id, None)
        self.under_way[request_id] = runner
        caller = runner.asked.caller
        if caller.correlation_id:
            self._remember(caller.tenant, caller.correlation_id, request_id)

    def check_free(self, request_id: str) -> None:
        """Raises InvalidRequest while a request of that id is under way."""
        if request_id in self.under_way:
            raise InvalidRequest(f"request id {request_id} is in use", "request_id")

    def end(self, runner: RequestRunner, now: float, page_size: int) -> None:
        request_id = runner.asked.request_id
        if self.under_way.get(request_id) is runner:
            del self.under_way[request_id]
        self._ended[request_id] = (now, runner)
        self.ended_rows.add(row_of(runner, page_size, now))
        self.forget(now)

    def forget(self, now: float) -> None:
        """Drops what ended more than a minute ago, and what is too much."""
        while self._ended:
            ended, _ = next(iter(self._ended.values()))
            if len(self._ended) <= MAX_ENDED and now - ended < ENDED_SECONDS:
                return
            self._ended.popitem(last=False)

    # Names.

    def named(self, caller: Caller) -> Caller:
        """The caller, with its name for the request as the id, if that is free.

        Only the public's names become ids: with theirs, a tenant could see that another one had
        used a name. A request that was sent before may have the id already, at a router that is
        gone.
        """
        if caller.tenant != PUBLIC or caller.num_sent_before:
            return caller
        if self._take(caller.correlation_id):
            return replace(caller, request_id=caller.correlation_id)
        return caller

    def numbered(self, caller: Caller, index: int) -> Caller:
        """The caller of one of several prompts, with an id of its own made of theirs."""
        suffix = f"-{index}"
        request_id = caller.request_id[: MAX_REQUEST_ID_LEN - len(suffix)] + suffix
        return replace(
            caller,
            request_id=request_id if self._take(request_id) else make_request_id(),
            traceparent=sibling_traceparent(caller.traceparent, index),
        )

    def id_of(self, tenant: Tenant, name: str) -> str:
        """The id of this tenant's latest request of that name; otherwise the name itself."""
        return self._ids.get((tenant.name, name), name)

    def _remember(self, tenant: Tenant, name: str, request_id: str) -> None:
        self._ids[tenant.name, name] = request_id
        self._ids.move_to_end((tenant.name, name))
        if len(self._ids) > MAX_NAMES:
            self._ids.popitem(last=False)

    def _take(self, name: str) -> bool:
        """Whether an id is free; from now on it is not."""
        is_used = name in self._taken or self.find(name) is not None
        if is_used or not is_request_id(name):
            return False
        self._taken[name] = None
        if len(self._taken) > MAX_NAMES:
            self._taken.popitem(last=False)
        return True

    def find(self, request_id: str) -> RequestRunner | None:
        if runner := self.under_way.get(request_id):
            return runner
        _, ended = self._ended.get(request_id, (0.0, None))
        return ended

    def find_for(self, tenant: Tenant, name: str) -> RequestRunner | None:
        """This tenant's request of that name, or of that id."""
        runner = self.find(self.id_of(tenant, name))
        return runner if runner is not None and runner.asked.tenant == tenant else None

    # News from workers.

    def cursors(self, name: WorkerName) -> Iterator[TokenCursor]:
        """The cursors from which a decode worker should go on, for all its requests."""
        return (runner.cursor for runner in self if runner.decode_worker == name)

    def check_stalled(self, now: float) -> None:
        """Checks every request; called now and then."""
        for runner in self:
            runner.check_stalled(now)
        self.forget(now)

    def on_worker_lost(self, name: WorkerName, cause: str) -> None:
        for runner in self:
            if runner.attempt is not None:
                runner.attempt.on_worker_lost(name, cause)

    def came_back(self, name: WorkerName) -> None:
        """This life may have been reported lost."""
        for runner in self:
            runner.came_back(name)


class Evacuation:
    """Moves the requests of draining decode workers to others, while those have room
    (docs/decisions/0084).

    It is called again and again, so nothing has to be announced: a beat that came late counts, and
    so does a worker that has room only now.
    """

    def __init__(self, ctx: RouterContext) -> None:
        self._ctx = ctx

    def look(self, runners: Iterable[RequestRunner], now: float) -> None:
        """Asks draining workers to let the requests go that can leave."""
        attempts = [(runner, runner.attempt) for runner in runners]
        leaving = Counter(attempt.leaves for _, attempt in attempts if attempt is not None)
        for runner, attempt in attempts:
            if attempt is None or leaving[attempt.decode] >= MAX_LEAVING:
                continue
            if self._try(runner, attempt, now):
                leaving[attempt.decode] += 1

    def _try(self, runner: RequestRunner, attempt: RouterAttempt, now: float) -> bool:
        """Whether the worker was asked to let the request go."""
        if not attempt.may_leave(now):
            return False
        worker = self._ctx.fleet.get(attempt.decode)
        if worker is None or worker.beat.is_ready:
            return False
        if not takers(self._ctx.fleet, worker, runner.num_tokens, now):
            return False
        attempt.is_leaving = True
        self._ctx.outlive(self._detach(runner.asked.request_id, attempt))
        return True

    async def _detach(self, request_id: str, attempt: RouterAttempt) -> None:
        workers, router = self._ctx.workers, self._ctx.router_id
        if not await workers.detach(attempt.decode, request_id, attempt.number, router):
            attempt.stays(self._ctx.clock())
