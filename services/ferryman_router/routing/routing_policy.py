"""Chooses the pair of workers for a request: the one with the least predicted seconds. Pure.

    seconds(prefill, decode) =  queue    tokens before it at the prefill worker x seconds per token
                             +  fetch    bytes that storage or a peer has x seconds per byte
                             +  load     bytes that the host then has x seconds per byte
                             +  prefill  tokens that no tier has kept x seconds per token
                             +  handoff  seconds of any, as measured, and tokens that decode does
                                         not hold x seconds per token
                             +  row      the wait for a row at decode

The numbers of the choice and of its alternatives are the explanation; they are never computed a
second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from ferryman.cache.manifest import Exactness, Kind
from ferryman.handoff.usage import CachedTokens
from ferryman.wire.nats.heartbeat import DECODE, PREFILL, Heartbeat, ServedState
from ferryman.wire.plane_values import GRPC, LOCAL, MEMORY, NIXL
from ferryman.wire.redis.index import NodePrefix
from ferryman_router.routing.fleet import Fleet, FleetWorker, WorkerName, is_pair, keeps_state
from ferryman_router.routing.generate_request import PageKeyCache
from ferryman_router.routing.prefix_sources import (
    NO_REACH,
    FetchRates,
    PrefixFetch,
    PrefixReach,
    best_prefix_fetch,
)

MAX_EXPLAINED = 8
PLANES = (LOCAL, MEMORY, NIXL, GRPC)  # the fastest first


@dataclass(frozen=True, slots=True)
class RoutingCosts:
    """Guesses for what workers and host-caches have not measured, or not reported, yet.

    A prefill worker with work for `soon_seconds` gets no more: requests that wait there keep their
    order, and only those that wait here can still go elsewhere, or let others pass.
    """

    prefill_seconds_per_token: float = 1e-3
    load_seconds_per_byte: float = 1 / 5e9
    storage_seconds_per_byte: float = 1 / 1e9
    peer_seconds_per_byte: float = 1 / 5e8
    bytes_per_token: float = 100_000
    handoff_seconds_per_token: float = 5e-5
    step_seconds: float = 0.02
    soon_seconds: float = 0.25


CacheIndex = Mapping[ServedState, Mapping[str, NodePrefix]]


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """The next `attempt` of a request, as the policy sees it. `cache_index` has, for each state
    that workers keep, by node how much of it is on which tier; `max_tokens` may still be generated.

    `excluded` is evaluated on every try, so a worker that failed this request becomes eligible
    again later. `shared_by` is the decode worker that holds the whole prompt, from another answer
    to it: cache events may not have reported that yet, and they never report its end. `kept_by`
    is the decode worker that drains and keeps the state of all tokens but the last: only it can
    hand them off. A prompt that is to be scored `computes_all` of its tokens at prefill, whatever
    is cached there.
    """

    chains: PageKeyCache
    attempt: int = 1
    max_tokens: int = 1
    cache_index: CacheIndex = field(default_factory=dict)
    excluded: Callable[[], frozenset[WorkerName]] = frozenset
    shared_by: WorkerName | None = None
    kept_by: WorkerName | None = None
    computes_all: bool = False

    @property
    def prompt_len(self) -> int:
        return len(self.chains.token_ids)


@dataclass(frozen=True, slots=True)
class RouteChoice:
    """A pair of workers, the seconds predicted for it, and where the prefix would come from.

    `arithmetic` is that of both. `unlike_tokens` are the prefix that others keep in another one, if
    that is longer than what can be used; else 0.
    """

    prefill: WorkerName
    decode: WorkerName
    queue_seconds: float
    prefill_seconds: float
    handoff_seconds: float
    row_seconds: float
    arrival: PrefixFetch
    plane: str
    arithmetic: str
    unlike_tokens: int = 0

    @property
    def total_seconds(self) -> float:
        arrival = self.arrival.fetch_seconds + self.arrival.load_seconds
        at_prefill = self.queue_seconds + arrival + self.prefill_seconds
        return at_prefill + self.handoff_seconds + self.row_seconds

    @property
    def exactness(self) -> Exactness:
        return Exactness.under(self.arithmetic)

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
    """One decision: the choice, and the best alternatives."""

    attempt: int
    chosen: RouteChoice
    others: tuple[RouteChoice, ...]


def choose(
    fleet: Fleet, asking: RoutingRequest, *, costs: RoutingCosts, now: float
) -> Explanation | None:
    """The best pair; None while no ready pair has room and keeps the same kind of state."""
    if asking.kept_by is not None and (source := fleet.get(asking.kept_by)) is not None:
        return _best(fleet, asking, _moves(fleet, source, asking, costs, now))
    prefills = [worker for worker in fleet.usable(PREFILL, now) if _starts_soon(worker, costs)]
    decodes = [worker for worker in fleet.usable(DECODE, now) if _has_row(worker)]
    if not prefills or not decodes:
        return None  # usual while requests wait, so it is checked before any cost
    excluded = asking.excluded()
    candidates = (
        _candidate(prefill, decode, arrival, asking, costs)
        for prefill, arrival in _arrivals(prefills, fleet.host_caches(), asking, costs)
        for decode in decodes
        if excluded.isdisjoint((prefill.name, decode.name)) and _may_serve(prefill, decode, asking)
    )
    return _best(fleet, asking, candidates)


def _best(
    fleet: Fleet, asking: RoutingRequest, candidates: Iterable[RouteChoice]
) -> Explanation | None:
    ordered = sorted(
        candidates, key=lambda c: (c.total_seconds, c.prefill.worker_id, c.decode.worker_id)
    )
    if not ordered:
        return None
    chosen, *others = (_with_unlike(fleet, asking, choice) for choice in ordered[:MAX_EXPLAINED])
    return Explanation(asking.attempt, chosen, tuple(others))


def _with_unlike(fleet: Fleet, asking: RoutingRequest, choice: RouteChoice) -> RouteChoice:
    """The choice, with what is kept of the prompt in other arithmetics alone."""
    prefill = fleet.get(choice.prefill)
    if prefill is None or asking.computes_all:
        return choice
    state = prefill.beat.state
    on_devices = (
        worker.cache_index.usable_tokens(asking.chains.of(worker.beat.state), asking.prompt_len)
        for worker in fleet
        if keeps_state(worker.beat) and worker.beat.state.is_unlike(state)
    )
    in_tiers = (
        holding.usable_pages * other_state.page_size
        for other_state, nodes in asking.cache_index.items()
        if other_state.is_unlike(state)
        for holding in nodes.values()
    )
    unlike = max(chain(on_devices, in_tiers), default=0)
    return replace(choice, unlike_tokens=unlike) if unlike > choice.usable_tokens else choice


def takers(fleet: Fleet, leaving: FleetWorker, prompt_len: int, now: float) -> list[FleetWorker]:
    """The decode workers with room to which a draining one could hand off a request of so many
    tokens."""
    return [
        decode
        for decode in fleet.usable(DECODE, now)
        if decode.name != leaving.name
        and decode.beat.state == leaving.beat.state
        and prompt_len <= decode.beat.max_len
        and _has_row(decode)
    ]


def _moves(
    fleet: Fleet,
    source: FleetWorker,
    asking: RoutingRequest,
    costs: RoutingCosts,
    now: float,
) -> Iterator[RouteChoice]:
    """Hand-offs by the worker that keeps the state: nothing waits there, and nothing is
    computed."""
    kept = asking.prompt_len - 1
    arrival = best_prefix_fetch(
        PrefixReach(kept, kept, kept, kept, kept), _rates(source.beat, None, costs)
    )
    excluded = asking.excluded()
    for decode in takers(fleet, source, asking.prompt_len, now):
        if decode.name not in excluded:
            choice = _candidate(source, decode, arrival, asking, costs)
            # A state is large enough for NIXL, or not: then it leaves by gRPC.
            plane = MEMORY if choice.plane == MEMORY else GRPC
            yield replace(choice, queue_seconds=0.0, prefill_seconds=0.0, plane=plane)


def longest_request(fleet: Fleet) -> int:
    """The longest request that some pair, busy or not, can hold; 0 while there is no pair."""
    prefills = [worker.beat for worker in fleet if worker.beat.serves(PREFILL)]
    decodes = [worker.beat for worker in fleet if worker.beat.serves(DECODE)]
    pairs = ((p, d) for p in prefills for d in decodes if is_pair(p, d))
    return max((min(p.max_len, d.max_len) for p, d in pairs), default=0)


def least_prefill(
    fleet: Fleet, asking: RoutingRequest, *, costs: RoutingCosts, now: float
) -> tuple[int, float]:
    """Tokens to compute, and seconds for them, at the worker that needs the least; busy or not."""
    hosts = fleet.host_caches()
    arrivals = _arrivals(fleet.usable(PREFILL, now), hosts, asking, costs)
    uncached = (
        (asking.prompt_len - arrival.cached.total, _seconds_per_token(prefill.beat, costs))
        for prefill, arrival in arrivals
    )
    needs = [(num_tokens, num_tokens * seconds) for num_tokens, seconds in uncached]
    return min(needs, key=lambda need: need[1], default=(asking.prompt_len, 0.0))


def _starts_soon(prefill: FleetWorker, costs: RoutingCosts) -> bool:
    """Whether a prompt sent there would begin at once, or nearly so.

    By this router's own claims: until a worker has planned a prompt, its beats count the cached
    part of it, too, and would keep prompts away for which there is nothing to compute.
    """
    has_row = prefill.num_requests < prefill.beat.max_running
    seconds = prefill.claimed_tokens * _seconds_per_token(prefill.beat, costs)
    return has_row and seconds <= costs.soon_seconds


def _has_row(decode: FleetWorker) -> bool:
    """Whether it holds fewer requests, running and reserved, than it has rows for."""
    return decode.num_requests < max(decode.beat.max_running, decode.beat.max_requests)


def _may_serve(prefill: FleetWorker, decode: FleetWorker, asking: RoutingRequest) -> bool:
    fits = asking.prompt_len <= min(prefill.beat.max_len, decode.beat.max_len)
    return fits and is_pair(prefill.beat, decode.beat)


def _arrivals(
    prefills: Iterable[FleetWorker],
    hosts: Mapping[str, Heartbeat],
    asking: RoutingRequest,
    costs: RoutingCosts,
) -> Iterator[tuple[FleetWorker, PrefixFetch]]:
    for prefill in prefills:
        host = hosts.get(prefill.beat.node)
        threshold = host.prefetch_threshold if host is not None else 0
        rates = _rates(prefill.beat, host, costs)
        yield prefill, best_prefix_fetch(_reach(prefill, asking).fetching(threshold), rates)


def _reach(prefill: FleetWorker, asking: RoutingRequest) -> PrefixReach:
    """A node without a host-cache reaches as far as its device."""
    if asking.computes_all:
        return NO_REACH
    page_size, keys = _page_size(prefill), asking.chains.of(prefill.beat.state)
    device = prefill.cache_index.usable_tokens(keys, asking.prompt_len)
    matched = device
    if Kind.FULL in prefill.beat.state.kinds:
        matched = min(prefill.cache_index.depth(keys) * page_size, asking.prompt_len - 1)
    if not prefill.beat.node:
        return PrefixReach(device, matched, device, device, device)
    nodes = asking.cache_index.get(prefill.beat.state, {})
    node_prefix = nodes.get(prefill.beat.node)
    host = max(device, node_prefix.host_pages * page_size if node_prefix else 0)
    # Its host-cache reads other nodes' objects as its own storage, at the same pace.
    in_storage = max(node_prefix.usable_pages, node_prefix.shared_pages) if node_prefix else 0
    storage = max(host, in_storage * page_size)
    others = (
        holding.usable_pages * page_size
        for node_id, holding in nodes.items()
        if node_id != prefill.beat.node and holding.node.address
    )
    return PrefixReach(device, matched, host, storage, max(storage, *others, 0))


def _rates(prefill: Heartbeat, host: Heartbeat | None, costs: RoutingCosts) -> FetchRates:
    storage = host.storage_seconds_per_byte if host is not None else 0.0
    peer = host.peer_seconds_per_byte if host is not None else 0.0
    return FetchRates(
        load=prefill.load_seconds_per_byte or costs.load_seconds_per_byte,
        storage=storage or costs.storage_seconds_per_byte,
        peer=peer or costs.peer_seconds_per_byte,
        bytes_per_token=prefill.page_bytes / prefill.state.page_size or costs.bytes_per_token,
        snapshot_bytes=prefill.snapshot_bytes,
        prefill=_seconds_per_token(prefill, costs),
    )


def _candidate(
    prefill: FleetWorker,
    decode: FleetWorker,
    arrival: PrefixFetch,
    asking: RoutingRequest,
    costs: RoutingCosts,
) -> RouteChoice:
    per_token = _seconds_per_token(prefill.beat, costs)
    at_decode = _held_at_decode(prefill, decode, asking)
    return RouteChoice(
        prefill.name,
        decode.name,
        queue_seconds=prefill.queue_tokens * per_token,
        prefill_seconds=(asking.prompt_len - arrival.cached.total) * per_token,
        handoff_seconds=_handoff_seconds(prefill, asking.prompt_len - at_decode, costs),
        row_seconds=_row_wait(decode, costs),
        arrival=arrival,
        plane=_plane(prefill.beat, decode.beat),
        arithmetic=prefill.beat.state.arithmetic,
    )


def _handoff_seconds(prefill: FleetWorker, num_tokens: int, costs: RoutingCosts) -> float:
    """None without tokens to hand off: the last ones of a prompt and its recurrent state travel
    once it is computed, and decode looks at all of it before it says that it has the request."""
    if not num_tokens:
        return 0.0
    return prefill.beat.handoff_seconds + num_tokens * costs.handoff_seconds_per_token


def _seconds_per_token(prefill: Heartbeat, costs: RoutingCosts) -> float:
    return prefill.seconds_per_token or costs.prefill_seconds_per_token


def _plane(prefill: Heartbeat, decode: Heartbeat) -> str:
    """The plane that the pair will agree on when decode reserves: the fastest that both have."""
    # Memory is named with its place: two machines have different ones.
    names = frozenset(prefill.planes) & frozenset(decode.planes)
    both = {name.partition("@")[0] for name in names}
    return next((plane for plane in PLANES if plane in both), "")


def _held_at_decode(prefill: FleetWorker, decode: FleetWorker, asking: RoutingRequest) -> int:
    """Tokens whose pages need not travel; a recurrent state does, except for siblings and within
    one worker."""
    if decode.name == asking.shared_by or decode.name == prefill.name:
        return asking.prompt_len
    depth = min(
        decode.cache_index.depth(asking.chains.of(decode.beat.state)),
        asking.prompt_len // _page_size(decode),
    )
    return depth * _page_size(decode) if Kind.FULL in decode.beat.state.kinds else 0


def _page_size(worker: FleetWorker) -> int:
    return worker.beat.state.page_size


def _row_wait(decode: FleetWorker, costs: RoutingCosts) -> float:
    """A fuller batch makes every request's steps longer; beyond its rows there is a queue."""
    step = decode.beat.step_seconds or costs.step_seconds
    return step * decode.num_requests / max(1, decode.beat.max_running)
