"""Who shall serve a request: the pair of workers with the least predicted seconds. Pure.

    seconds(prefill, decode) =  queue    tokens before it at the prefill worker x seconds per token
                             +  load     host units to bring in, and the wait for a row at decode
                             +  prefill  tokens that nobody has kept x seconds per token
                             +  handoff  tokens that decode does not hold x seconds per token

The numbers of the choice and of what else there was are the explanation; they are never computed
a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ferryman.cache.manifest import Kind
from ferryman_router.chains import Chains
from ferryman_router.fleet import Fleet, Worker, WorkerName

MAX_EXPLAINED = 8


@dataclass(frozen=True, slots=True)
class Costs:
    """Guesses for what workers have not measured yet."""

    prefill_seconds_per_token: float = 1e-3
    load_seconds_per_token: float = 2e-5
    handoff_seconds_per_token: float = 5e-5
    step_seconds: float = 0.02
    max_queued: int = 64


@dataclass(frozen=True, slots=True)
class Asking:
    """A request as the policy sees it. `host_tokens` maps a node to its usable prefix.

    `excluded` is asked at each try: who failed this request is given another chance in time.
    """

    chains: Chains
    prompt_len: int
    host_tokens: Mapping[str, int] = field(default_factory=dict)
    excluded: Callable[[], frozenset[WorkerName]] = frozenset


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pair of workers and the seconds predicted for it."""

    prefill: WorkerName
    decode: WorkerName
    queue_seconds: float
    load_seconds: float
    prefill_seconds: float
    handoff_seconds: float
    usable_tokens: int
    host_tokens: int

    @property
    def total_seconds(self) -> float:
        return self.queue_seconds + self.load_seconds + self.prefill_seconds + self.handoff_seconds


@dataclass(frozen=True, slots=True)
class Explanation:
    """One decision: the choice, and the best of what else there was."""

    attempt: int
    chosen: Candidate
    others: tuple[Candidate, ...]


def choose(
    fleet: Fleet, asking: Asking, *, attempt: int, costs: Costs, now: float
) -> Explanation | None:
    """The best pair; None while no ready pair has room and keeps the same kind of state."""
    excluded = asking.excluded()
    candidates = sorted(
        (
            _candidate(prefill, decode, asking, costs)
            for prefill in fleet.usable("prefill", now)
            for decode in fleet.usable("decode", now)
            if excluded.isdisjoint((prefill.name, decode.name))
            and _may_serve(prefill, decode, asking, costs)
        ),
        key=lambda c: (c.total_seconds, c.prefill.worker_id, c.decode.worker_id),
    )
    if not candidates:
        return None
    return Explanation(attempt, candidates[0], tuple(candidates[1:MAX_EXPLAINED]))


def longest_request(fleet: Fleet) -> int:
    """The longest request that some pair, busy or not, can hold; 0 while there is no pair."""
    prefills = [worker.beat for worker in fleet if worker.beat.role == "prefill"]
    decodes = [worker.beat for worker in fleet if worker.beat.role == "decode"]
    pairs = ((p, d) for p in prefills for d in decodes if p.state == d.state)
    return max((min(p.max_len, d.max_len) for p, d in pairs), default=0)


def _may_serve(prefill: Worker, decode: Worker, asking: Asking, costs: Costs) -> bool:
    fits = asking.prompt_len <= min(prefill.beat.max_len, decode.beat.max_len)
    has_room = prefill.beat.num_queued + prefill.num_sent < costs.max_queued
    return fits and has_room and prefill.beat.state == decode.beat.state


def _candidate(prefill: Worker, decode: Worker, asking: Asking, costs: Costs) -> Candidate:
    per_token = prefill.beat.seconds_per_token or costs.prefill_seconds_per_token
    keys = asking.chains.of(prefill.beat.state)
    on_device = prefill.holdings.usable_tokens(keys, asking.prompt_len)
    on_host = max(on_device, asking.host_tokens.get(prefill.beat.node, 0))
    load = (on_host - on_device) * costs.load_seconds_per_token
    if load >= (on_host - on_device) * per_token:  # the worker's own plan would recompute
        on_host, load = on_device, 0.0
    at_decode = _held_at_decode(decode, asking)
    return Candidate(
        prefill.name,
        decode.name,
        queue_seconds=(prefill.beat.queue_tokens + prefill.sent_tokens) * per_token,
        load_seconds=load + _row_wait(decode, costs),
        prefill_seconds=(asking.prompt_len - on_host) * per_token,
        handoff_seconds=(asking.prompt_len - at_decode) * costs.handoff_seconds_per_token,
        usable_tokens=on_host,
        host_tokens=on_host - on_device,
    )


def _held_at_decode(decode: Worker, asking: Asking) -> int:
    """Tokens whose pages need not travel; a recurrent state always does."""
    depth = min(
        decode.holdings.depth(asking.chains.of(decode.beat.state)),
        asking.prompt_len // _page_size(decode),
    )
    return depth * _page_size(decode) if Kind.FULL in decode.beat.state.kinds else 0


def _page_size(worker: Worker) -> int:
    return worker.beat.state.page_size


def _row_wait(decode: Worker, costs: Costs) -> float:
    """A fuller batch makes every step of everyone longer; beyond its rows there is a queue."""
    step = decode.beat.step_seconds or costs.step_seconds
    wanted = decode.beat.num_running + decode.beat.num_queued + decode.num_sent
    return step * wanted / max(1, decode.beat.max_running)
