"""Domain values that hypothesis draws for the wire's property tests."""

from __future__ import annotations

import string
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from ferryman.cache.keys import as_token_ids
from ferryman.cache.manifest import Kind
from ferryman.cache.units import HostUnit, Tier
from ferryman.handoff.offsets import TokenFrame
from ferryman.handoff.usage import CachedTokens
from ferryman.handoff.values import PageRange, Reservation, UnitDigest, WantedUnit
from ferryman.schedule.batch import Sampled
from ferryman.schedule.request import FinishReason, Request, SamplingParams
from ferryman.tiers.prefetch_values import Lack, Prefetched, Traffic
from ferryman.wire import public, values
from ferryman.wire.codec.caches import CacheEvent, CacheSnapshot
from ferryman.wire.codec.handoff import ReserveAnswer
from ferryman.wire.planes import GrpcPlane, NixlGrant, NixlOffer

u32 = st.integers(0, 2**32 - 1)
counts = st.integers(0, 2**20)
epochs = st.integers(1, 2**63 - 1)
texts = st.text(max_size=12)
kinds = st.sampled_from(Kind)
keys = st.binary(min_size=16, max_size=16)
chains = st.lists(keys, max_size=5).map(tuple)
finite = st.floats(allow_nan=False, allow_infinity=False)
seconds = st.integers(0, 10**9).map(lambda ms: ms / 1000)
request_ids = st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=64)
token_lists = st.lists(u32, min_size=1, max_size=9)
logprobs = st.dictionaries(u32, finite, max_size=4)
sampled = st.builds(Sampled, u32, logprobs)
cached = st.builds(CachedTokens, *[st.integers(0, 37)] * 4)
uncached = st.lists(st.builds(values.UncachedPages, texts, counts), max_size=3).map(tuple)
usages = st.builds(values.Usage, st.integers(150, 9999), counts, cached, uncached, counts, counts)
addresses = st.builds(values.WorkerAddress, texts, texts, epochs)
ranges = st.builds(
    lambda kind, first, length: PageRange(kind, first, first + length),
    kinds,
    counts,
    st.integers(1, 9),
)
digests = st.builds(UnitDigest, kinds, counts, keys)
wanted = st.lists(st.builds(WantedUnit, kinds, st.integers(0, 6), epochs), max_size=8).map(tuple)
host_units = st.builds(HostUnit, kinds, counts, keys, epochs, counts, keys, st.sampled_from(Tier))
traffic = st.builds(Traffic, counts, epochs, st.integers(0, 10**9).map(lambda us: us / 1_000_000))
prefetched = st.builds(
    Prefetched,
    *[counts] * 4,
    st.booleans(),
    st.sampled_from(["", *map(str, Lack)]),
    st.dictionaries(st.sampled_from(Tier), traffic),
)
failures = st.builds(values.Failure, texts, texts, texts, texts, seconds)


def sampling() -> SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 2**31 - 1),
        temperature=st.floats(0, 100),
        top_p=st.floats(0, 1, exclude_min=True),
        top_k=st.integers(0, 2**31 - 1),
        min_p=st.floats(0, 1),
        repetition_penalty=st.floats(0, 100, exclude_min=True),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        seed=st.integers(-(2**63), 2**63 - 1),
        stop=st.lists(st.text(min_size=1, max_size=9), max_size=3).map(tuple),
        stop_token_ids=st.lists(u32, max_size=3).map(tuple),
        logprobs=st.integers(0, 20),
        ignore_eos=st.booleans(),
    )


def contexts() -> SearchStrategy[values.RequestContext]:
    salts = st.binary(max_size=64)
    return st.builds(values.RequestContext, request_ids, counts, seconds, seconds, texts, salts)


@st.composite
def requests(draw: st.DrawFn, request_id: str) -> Request:
    token_ids = draw(token_lists)
    return Request(
        request_id=request_id,
        token_ids=as_token_ids(token_ids),
        keys=draw(chains),
        sampling=draw(sampling()),
        stop_token_ids=draw(st.frozensets(u32, max_size=3)),
        num_generated=draw(st.integers(0, len(token_ids) - 1)),
    )


@st.composite
def prefill_orders(draw: st.DrawFn) -> values.PrefillOrder:
    context = draw(contexts())
    request = draw(requests(context.request_id))
    decode, digest, router_id = draw(addresses), draw(texts), draw(texts)
    return values.PrefillOrder(context, draw(epochs), decode, router_id, request, digest)


@st.composite
def reserve_orders(draw: st.DrawFn) -> values.ReserveOrder:
    context = draw(contexts())
    request = draw(requests(context.request_id))
    writer, digest, router_id = draw(addresses), draw(texts), draw(texts)
    epoch, manifest = draw(epochs), draw(texts)
    offer = draw(st.one_of(st.just(GrpcPlane()), st.builds(NixlOffer, texts)))
    return values.ReserveOrder(context, epoch, writer, router_id, request, digest, manifest, offer)


def reserve_answers() -> SearchStrategy[ReserveAnswer]:
    reservations = st.builds(Reservation, texts, epochs, counts, wanted, seconds)
    over_grpc = st.builds(ReserveAnswer, reservations, texts, counts)
    return st.one_of(over_grpc, st.builds(_granted, over_grpc, texts, st.binary(max_size=9)))


def _granted(answer: ReserveAnswer, agent: str, metadata: bytes) -> ReserveAnswer:
    addresses = tuple(2**40 + 64 * nth for nth, _ in enumerate(answer.reservation.wanted))
    return replace(answer, plane=NixlGrant(agent, metadata, -1, addresses))


def commit_orders() -> SearchStrategy[values.CommitOrder]:
    written = st.lists(ranges, max_size=4).map(tuple)
    some_digests = st.lists(digests, max_size=4).map(tuple)
    return st.builds(
        values.CommitOrder, contexts(), texts, epochs, written, some_digests, sampled, usages
    )


def abort_orders() -> SearchStrategy[values.AbortOrder]:
    flags = st.booleans()
    return st.builds(values.AbortOrder, request_ids, counts, texts, texts, epochs, flags, flags)


def plans() -> SearchStrategy[values.PlanSummary]:
    kind_plans = st.lists(st.builds(values.KindPlan, kinds, counts, counts, counts), max_size=3)
    positions = st.lists(counts, max_size=3).map(tuple)
    return st.builds(
        values.PlanSummary, counts, counts, texts, kind_plans.map(tuple), uncached, positions
    )


def progress() -> SearchStrategy[values.PrefillProgress]:
    return st.one_of(
        st.builds(values.Queued, counts),
        st.builds(values.Admitted, plans()),
        st.builds(values.ChunkDone, counts, counts, counts, counts),
        st.builds(values.HandedOff, texts, sampled, usages, epochs, finite, texts),
    )


@st.composite
def request_tokens(draw: st.DrawFn) -> values.RequestTokens:
    token_ids = tuple(draw(token_lists))
    frame = TokenFrame(draw(counts), draw(counts), token_ids, draw(st.integers(0, 2**64 - 1)))
    each = draw(st.lists(logprobs, min_size=len(token_ids), max_size=len(token_ids)))
    ending = draw(
        st.one_of(
            st.just(values.GoesOn()),
            st.builds(values.Finished, st.sampled_from(FinishReason), usages),
            failures,
        )
    )
    some = tuple(each) if draw(st.booleans()) else ()
    return values.RequestTokens(draw(request_ids), frame, some, ending)


def step_frames() -> SearchStrategy[values.StepFrame]:
    return st.builds(
        values.StepFrame, epochs, epochs, st.lists(request_tokens(), max_size=3).map(tuple)
    )


def key_sets() -> SearchStrategy[Any]:
    return st.dictionaries(kinds, chains, max_size=3)


def cache_events() -> SearchStrategy[CacheEvent]:
    return st.builds(CacheEvent, texts, epochs, epochs, key_sets(), key_sets())


def cache_snapshots() -> SearchStrategy[CacheSnapshot]:
    return st.builds(CacheSnapshot, texts, epochs, epochs, key_sets(), counts)


def prompts() -> SearchStrategy[public.TextPrompt | public.ChatPrompt]:
    turns = st.lists(st.builds(public.ChatTurn, texts, texts), max_size=3).map(tuple)
    return st.one_of(st.builds(public.TextPrompt, texts), st.builds(public.ChatPrompt, turns))


def generate_events() -> SearchStrategy[public.GenerateEvent]:
    some = st.lists(logprobs, max_size=3).map(tuple)
    return st.one_of(
        st.builds(public.GenerateStarted, texts, texts, counts, st.integers(-(2**63), 2**63 - 1)),
        st.builds(public.TokenChunk, counts, token_lists.map(tuple), texts, some),
        st.builds(public.GenerateFinished, st.sampled_from(FinishReason), usages, texts),
    )


def explanations() -> SearchStrategy[public.RouteExplanation]:
    candidates = st.builds(
        public.RouteCandidate,
        *[texts] * 2,
        *[finite] * 5,
        *[counts] * 2,
        *[finite] * 3,
        *[counts] * 3,
        texts,
    )
    others = st.lists(candidates, max_size=2).map(tuple)
    return st.builds(public.RouteExplanation, counts, candidates, others)
