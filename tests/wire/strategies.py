"""Domain values that hypothesis draws for the wire's property tests."""

from __future__ import annotations

import string
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from ferryman.cache.keys import as_token_ids
from ferryman.cache.manifest import Kind
from ferryman.cache.units import HostUnit, Tier
from ferryman.handoff.effects import WriteFence
from ferryman.handoff.offsets import TokenFrame
from ferryman.handoff.usage import CachedTokens
from ferryman.handoff.values import PageRange, Reservation, UnitDigest, WantedUnit
from ferryman.ids import is_request_id
from ferryman.schedule.batch import Sampled
from ferryman.schedule.output_grammar import OutputGrammar
from ferryman.schedule.prompt_scores import PromptScores
from ferryman.schedule.request import FinishReason, Pin, Request, SamplingParams
from ferryman.schedule.token_rules import TokenRules
from ferryman.tiers.prefetch_values import Prefetched, PrefetchShortfall, Traffic
from ferryman.wire import public, values
from ferryman.wire.codec.caches import CacheEvent, CacheSnapshot
from ferryman.wire.codec.handoff import ReserveAnswer
from ferryman.wire.plane_values import (
    GrpcOnly,
    MemoryGrant,
    MemoryOffer,
    NixlGrant,
    NixlOffer,
    RankSlabs,
)

u32 = st.integers(0, 2**32 - 1)
counts = st.integers(0, 2**20)
epochs = st.integers(1, 2**63 - 1)
texts = st.text(max_size=12)
kinds = st.sampled_from(Kind)
keys = st.binary(min_size=16, max_size=16)
chains = st.lists(keys, max_size=5).map(tuple)
finite = st.floats(allow_nan=False, allow_infinity=False)
seconds = st.integers(0, 10**9).map(lambda ms: ms / 1000)
request_ids = st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=64).filter(
    is_request_id
)
token_lists = st.lists(u32, min_size=1, max_size=9)
logprobs = st.dictionaries(u32, finite, max_size=4)
sampled = st.builds(Sampled, u32, logprobs)
cached = st.builds(CachedTokens, *[st.integers(0, 37)] * 4)
uncached = st.lists(st.builds(values.UncachedPages, texts, counts), max_size=3).map(tuple)
usages = st.builds(
    values.Usage,
    st.integers(150, 9999),
    counts,
    cached,
    uncached,
    counts,
    counts,
    counts,
    cached,
)
addresses = st.builds(values.WorkerAddress, texts, texts, epochs)
signatures = st.builds(values.AttemptSignature, epochs, counts, st.binary(max_size=64))
reachable = st.builds(values.WorkerAddress, texts, st.just("host:1"), epochs)
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
    st.sampled_from(["", *map(str, PrefetchShortfall)]),
    st.dictionaries(st.sampled_from(Tier), traffic),
)
WHOLE = sorted(set(FinishReason) - {FinishReason.CANCELLED})
failures = st.builds(values.Failure, texts, texts, texts, texts, seconds)


def grammars() -> SearchStrategy[OutputGrammar]:
    options = st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=3)
    return st.one_of(
        st.just(OutputGrammar.json_object()),
        options.map(OutputGrammar.choice),
        st.text(min_size=1, max_size=9).map(OutputGrammar.regex),
        st.text(min_size=1, max_size=9).map(OutputGrammar.context_free),
        st.lists(options.map(OutputGrammar.choice), min_size=2, max_size=3).map(
            OutputGrammar.either
        ),
    )


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
        ignore_eos=st.just(False),
        grammar=st.one_of(st.none(), grammars()),
        prompt_logprobs=st.none() | st.integers(0, 20),
    ) | st.builds(SamplingParams, ignore_eos=st.booleans(), rules=token_rules())


def token_rules() -> SearchStrategy[TokenRules]:
    biases = st.lists(
        st.tuples(u32, st.floats(-100, 100)), max_size=3, unique_by=lambda pair: pair[0]
    )
    words = st.lists(st.lists(u32, min_size=1, max_size=3).map(tuple), max_size=3)
    allowed = st.lists(u32, max_size=3)
    return st.builds(
        TokenRules,
        st.integers(0, 2**31 - 1),
        biases.map(tuple),
        allowed.map(tuple),
        words.map(tuple),
    )


def contexts() -> SearchStrategy[values.RequestContext]:
    salts = st.binary(max_size=64)
    adapters = st.just("") | st.text("0123456789abcdef", min_size=32, max_size=32)
    return st.builds(
        values.RequestContext, request_ids, counts, seconds, seconds, texts, salts, adapters
    )


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
        num_siblings=draw(st.integers(0, 1024)),
        fork_points=tuple(draw(st.lists(u32, max_size=64))),
        pins=tuple(draw(st.lists(st.builds(Pin, u32, st.integers(0, 3600)), max_size=32))),
    )


@st.composite
def prefill_orders(draw: st.DrawFn) -> values.PrefillOrder:
    context = draw(contexts())
    request = draw(requests(context.request_id))
    decode, digest, router_id = draw(reachable), draw(texts), draw(texts)
    epoch, unlike, signature = draw(epochs), draw(counts), draw(signatures)
    return values.PrefillOrder(
        context, epoch, decode, router_id, request, digest, unlike, signature
    )


@st.composite
def reserve_orders(draw: st.DrawFn) -> values.ReserveOrder:
    context = draw(contexts())
    request = draw(requests(context.request_id))
    writer, digest, router_id = draw(addresses), draw(texts), draw(texts)
    epoch, manifest = draw(epochs), draw(texts)
    others = st.builds(NixlOffer, texts), st.builds(MemoryOffer, texts)
    offer = draw(st.one_of(st.just(GrpcOnly()), *others))
    named = context, epoch, writer, router_id, request, digest, manifest, offer
    return values.ReserveOrder(*named, draw(signatures), draw(st.none() | u32))


def reserve_answers() -> SearchStrategy[ReserveAnswer]:
    reservations = st.builds(Reservation, texts, epochs, counts, wanted, seconds)
    over_grpc = st.builds(ReserveAnswer, reservations)
    granted = st.builds(_granted, over_grpc, texts, st.binary(max_size=9), st.integers(1, 4))
    memory = st.builds(MemoryGrant, texts, st.binary(max_size=32), st.integers(0, 1 << 40))
    lent = st.builds(ReserveAnswer, reservations, memory)
    return st.one_of(over_grpc, granted, lent)


def _granted(answer: ReserveAnswer, agent: str, metadata: bytes, num_ranks: int) -> ReserveAnswer:
    slots = tuple(nth for nth, _ in enumerate(answer.reservation.wanted))
    by_kind = {
        kind: tuple(2**40 + 64 * rank for rank in range(num_ranks))
        for kind in {unit.kind for unit in answer.reservation.wanted}
    }
    slabs = RankSlabs((-1,) * num_ranks, by_kind)
    return replace(answer, plane=NixlGrant(agent, metadata, slabs, slots, "digest"))


def commit_orders() -> SearchStrategy[values.CommitOrder]:
    written = st.lists(ranges, max_size=4).map(tuple)
    some_digests = st.lists(digests, max_size=4).map(tuple)
    return st.builds(
        values.CommitOrder,
        contexts(),
        texts,
        epochs,
        written,
        some_digests,
        sampled,
        usages,
        st.binary(max_size=64),
    )


def stop_orders() -> SearchStrategy[values.StopOrder]:
    return st.builds(values.StopOrder, request_ids, counts, texts, epochs)


def stop_answers() -> SearchStrategy[values.StopAnswer]:
    return st.builds(values.StopAnswer, st.booleans(), st.booleans(), epochs)


def abort_orders() -> SearchStrategy[values.AbortOrder]:
    fences = st.builds(WriteFence, epochs, texts, counts)
    return st.one_of(
        st.builds(values.RouterAbort, request_ids, counts, texts, texts, st.binary(max_size=64)),
        st.builds(values.WriterAbort, request_ids, fences, texts, st.booleans()),
    )


@st.composite
def prompt_scores(draw: st.DrawFn) -> PromptScores:
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    entries = st.tuples(*[st.tuples(*[finite] * shape[1])] * shape[0])
    ids = st.tuples(*[st.tuples(*[u32] * shape[1])] * shape[0])
    return PromptScores(
        draw(st.integers(1, 2**20)),
        np.array(draw(ids), "<u4"),
        np.array(draw(entries)),
        np.array(draw(st.tuples(*[u32] * shape[0])), np.uint32),
    )


def progress() -> SearchStrategy[values.PrefillProgress]:
    return st.one_of(
        st.just(values.PrefillQueued()),
        st.builds(values.PrefillAdmitted, usages),
        st.builds(values.PrefillChunkDone, counts),
        st.builds(values.PrefillHandedOff, usages, epochs, finite),
    )


@st.composite
def request_tokens(draw: st.DrawFn) -> values.RequestTokens:
    token_ids = tuple(draw(token_lists))
    frame = TokenFrame(draw(counts), draw(counts), token_ids, draw(st.integers(0, 2**64 - 1)))
    each = draw(st.lists(logprobs, min_size=len(token_ids), max_size=len(token_ids)))
    ending = draw(
        st.one_of(
            st.just(values.StreamContinues()),
            st.builds(values.StreamContinues, usages.map(lambda usage: usage.at_decode)),
            st.builds(values.StreamFinished, st.sampled_from(FinishReason), usages),
            failures,
        )
    )
    some = tuple(each) if draw(st.booleans()) else ()
    return values.RequestTokens(draw(request_ids), frame, some, ending)


def key_sets() -> SearchStrategy[Any]:
    return st.dictionaries(kinds, chains, max_size=3)


def cache_events() -> SearchStrategy[CacheEvent]:
    return st.builds(CacheEvent, texts, epochs, epochs, key_sets(), key_sets())


def cache_snapshots() -> SearchStrategy[CacheSnapshot]:
    return st.builds(CacheSnapshot, texts, epochs, epochs, key_sets(), counts)


def prompts() -> SearchStrategy[public.TextPrompt | public.ChatPrompt]:
    turns = st.lists(st.builds(public.ChatTurn, texts, texts, texts), max_size=3).map(tuple)
    return st.one_of(
        st.builds(public.TextPrompt, texts, st.booleans(), st.booleans()),
        st.builds(public.ChatPrompt, turns, st.booleans(), texts),
    )


def generate_events() -> SearchStrategy[public.GenerateEvent]:
    some = st.lists(logprobs, max_size=3).map(tuple)
    return st.one_of(
        st.builds(public.GenerateStarted, texts, texts, counts, st.integers(-(2**63), 2**63 - 1)),
        st.builds(public.TokenChunk, counts, token_lists.map(tuple), texts, some),
        st.builds(public.GenerateFinished, st.sampled_from(WHOLE), usages, texts, texts),
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
