"""The account of a prompt says how much of its state the decode worker had itself."""

from __future__ import annotations

from tests.harness.pair import WorkerPair, pair_of_workers, request

from ferryman.cache.manifest import Kind
from ferryman.handoff.usage import NONE_CACHED, CachedTokens
from ferryman.schedule.batch import Sampled
from ferryman.schedule.request import FinishReason
from ferryman.wire.values import (
    PrefillOrder,
    RequestContext,
    StreamContinues,
    StreamFinished,
    Usage,
    WorkerAddress,
)
from ferryman_decode.decode_request import DecodeRequest

PROMPT = [3] * 21
DECODE = WorkerAddress("decode-1", "host:1", 1)
PREFILL_ORDER = PrefillOrder(
    RequestContext("r1", 1, 60.0), 1, DECODE, "router-1", request("r1", PROMPT), "digest"
)


async def usage_of(pair: WorkerPair, name: str, prompt: list[int]) -> Usage:
    await pair.run_prefill(pair.order(request(name, prompt, max_tokens=4)))
    _, last = await pair.read_tokens(name)
    assert isinstance(last.ending, StreamFinished)
    return last.ending.usage


async def test_pages_that_decode_has_are_counted_whoever_computed_them() -> None:
    """Prefill has forgotten them: it computes them again, and sends none that decode has."""
    async with pair_of_workers() as pair:
        page_size = pair.decode.engine.manifest.page_size
        first = await usage_of(pair, "r1", PROMPT)
        pair.prefill.engine.scheduler.flush()
        second = await usage_of(pair, "r2", PROMPT)
        other = await usage_of(pair, "r3", [4] * 21)
    held = CachedTokens(device=21 // page_size * page_size)
    assert held.total > 0
    assert (first.at_decode, second.at_decode, other.at_decode) == (NONE_CACHED, held, NONE_CACHED)
    assert second.cached == NONE_CACHED
    told = [facts.get("held") for facts in pair.decode.facts("reserved")]
    assert told == [None, {"device": held.device}, None]


async def test_what_was_not_sent_is_what_is_counted() -> None:
    """The pages that the reservation wants begin behind those that decode had."""
    async with pair_of_workers() as pair:
        for name in ("r1", "r2"):
            usage = await usage_of(pair, name, PROMPT)
        page_size = pair.decode.engine.manifest.page_size
        wanted = pair.decode.facts("reserved")[-1][f"wanted_{Kind.FULL}"]
    assert isinstance(wanted, list)
    assert usage.at_decode.device == wanted[0] * page_size > 0


def test_decode_takes_no_other_s_word_for_it() -> None:
    held = CachedTokens(device=16)
    decoding = DecodeRequest(PREFILL_ORDER, held=held)
    decoding.committed(Usage(21, cached=CachedTokens(host=16), at_decode=CachedTokens(peer=21)))
    assert decoding.usage == Usage(21, cached=CachedTokens(host=16), at_decode=held)


def test_the_first_token_says_what_decode_held_and_no_other() -> None:
    """An answer that the router ends at a stop string has no usage of decode's but this one."""
    held = CachedTokens(device=16)
    decoding = DecodeRequest(PREFILL_ORDER, held=held)
    for token_id in (5, 6):
        decoding.drawn(Sampled(token_id, {}))
    assert decoding.tokens_from(0).ending == StreamContinues(held), "also when it is asked again"
    assert decoding.tokens_from(1).ending == StreamContinues()
    decoding.finish(FinishReason.LENGTH)
    assert isinstance(decoding.tokens_from(1).ending, StreamFinished)
