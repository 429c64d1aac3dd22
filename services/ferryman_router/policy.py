"""Who shall serve a request: the pair of workers with the least predicted seconds. Pure.

    seconds(prefill, decode) =  queue    tokens before it at the prefill worker x seconds per token
                             +  fetch    bytes that storage or a peer has x seconds per byte
                             +  load     bytes that the host then has x seconds per byte
                             +  prefill  tokens that nobody has kept x seconds per token
                             +  handoff  tokens that decode does not hold x seconds per token
                             +  row      the wait for a row at decode

The numbers of the choice and of what else there was are the explanation; they are never computed
a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ferryman.cache.manifest import Kind
from ferryman.handoff.usage import CachedTokens
from ferryman.wire.beats import Beat
from ferryman.wire.index import Holding
from ferryman_router.arrivals import Arrival, Rates, Reach, best_arrival
from ferryman_router.chains import Chains
from ferryman_router.fleet import Fleet, Worker, WorkerName

MAX_EXPLAINED = 8
PLANES = ("nixl", "grpc")  # the fastest first


@dataclass(frozen=True, slots=True)
class Costs:
    """Guesses for what workers and host-caches have not measured, or not said, yet."""

    prefill_seconds_per_token: float = 1e-3
    load_seconds_per_byte: float = 1 / 5e9
    storage_seconds_per_byte: float = 1 / 1e9
    peer_seconds_per_byte: float = 1 / 5e8
    bytes_per_token: float = 100_000
    handoff_seconds_per_token: float = 5e-5
    step_seconds: float = 0.02
    max_queued: int = 64


@dataclass(frozen=True, slots=True)
class Asking:
    """A request as the policy sees it. `holdings` says by node how much of it is where.

    `excluded` is asked at each try: who failed this request is given another chance in time.
    """

    chains: Chains
    prompt_len: int
    holdings: Mapping[str, Holding] = field(default_factory=dict)
    excluded: Callable[[], frozenset[WorkerName]] = frozenset


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pair of workers, the seconds predicted for it, and where the prefix would come from."""

    prefill: WorkerName
    decode: WorkerName
    queue_seconds: float
    prefill_seconds: float
    handoff_seconds: float
    row_seconds: float
    arrival: Arrival
    plane: str

    @property
    def total_seconds(self) -> float:
        arrival = self.arrival.fetch_seconds + self.arrival.load_seconds
        at_prefill = self.queue_seconds + arrival + self.prefill_seconds
        return at_prefill + self.handoff_seconds + self.row_seconds

    @property
    def cached(self) -> CachedTokens:
        return self.arrival.cached

    @property
    def usable_tokens(self) -> int:
        """The prefix that need not be computed."""
        return self.cached.total

    @property
    def is_worth_fetching(self) -> bool:
        """Whether storage or a peer has some of it."""
        return self.cached.storage + self.cached.peer > 0


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
    hosts = fleet.host_caches()
    decodes = fleet.usable("decode", now)
    candidates = sorted(
        (
            _candidate(prefill, decode, arrival, asking, costs)
            for prefill, arrival in _arrivals(fleet.usable("prefill", now), hosts, asking, costs)
            for decode in decodes
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
    has_room = prefill.num_queued < costs.max_queued
    return fits and has_room and prefill.beat.state == decode.beat.state


def _arrivals(
    prefills: Iterable[Worker], hosts: Mapping[str, Beat], asking: Asking, costs: Costs
) -> Iterator[tuple[Worker, Arrival]]:
    for prefill in prefills:
        host = hosts.get(prefill.beat.node)
        threshold = host.prefetch_threshold if host is not None else 0
        rates = _rates(prefill.beat, host, costs)
        yield prefill, best_arrival(_reach(prefill, asking).fetching(threshold), rates)


def _reach(prefill: Worker, asking: Asking) -> Reach:
    """A node without a host-cache reaches as far as its device."""
    page_size, keys = _page_size(prefill), asking.chains.of(prefill.beat.state)
    device = prefill.holdings.usable_tokens(keys, asking.prompt_len)
    matched = device
    if Kind.FULL in prefill.beat.state.kinds:
        matched = min(prefill.holdings.depth(keys) * page_size, asking.prompt_len - 1)
    if not prefill.beat.node:
        return Reach(device, matched, device, device, device)
    own = asking.holdings.get(prefill.beat.node)
    host = max(device, own.host_pages * page_size if own else 0)
    storage = max(host, own.usable_pages * page_size if own else 0)
    others = (
        holding.usable_pages * page_size
        for node_id, holding in asking.holdings.items()
        if node_id != prefill.beat.node and holding.node.address
    )
    return Reach(device, matched, host, storage, max(storage, *others, 0))


def _rates(prefill: Beat, host: Beat | None, costs: Costs) -> Rates:
    storage = host.storage_seconds_per_byte if host is not None else 0.0
    peer = host.peer_seconds_per_byte if host is not None else 0.0
    return Rates(
        load=prefill.load_seconds_per_byte or costs.load_seconds_per_byte,
        storage=storage or costs.storage_seconds_per_byte,
        peer=peer or costs.peer_seconds_per_byte,
        bytes_per_token=prefill.page_bytes / prefill.state.page_size or costs.bytes_per_token,
        snapshot_bytes=prefill.snapshot_bytes,
        prefill=_seconds_per_token(prefill, costs),
    )


def _candidate(
    prefill: Worker, decode: Worker, arrival: Arrival, asking: Asking, costs: Costs
) -> Candidate:
    per_token = _seconds_per_token(prefill.beat, costs)
    at_decode = _held_at_decode(decode, asking)
    return Candidate(
        prefill.name,
        decode.name,
        queue_seconds=prefill.queue_tokens * per_token,
        prefill_seconds=(asking.prompt_len - arrival.cached.total) * per_token,
        handoff_seconds=(asking.prompt_len - at_decode) * costs.handoff_seconds_per_token,
        row_seconds=_row_wait(decode, costs),
        arrival=arrival,
        plane=_plane(prefill.beat, decode.beat),
    )


def _seconds_per_token(prefill: Beat, costs: Costs) -> float:
    return prefill.seconds_per_token or costs.prefill_seconds_per_token


def _plane(prefill: Beat, decode: Beat) -> str:
    """What the pair will agree on when decode reserves: the fastest plane that both have."""
    both = frozenset(prefill.planes) & frozenset(decode.planes)
    return next((plane for plane in PLANES if plane in both), "")


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
    return step * decode.num_requests / max(1, decode.beat.max_running)
