"""The door of both workers: an order that is not what it says is refused, and nothing is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tests.harness.pair import (
    MANIFEST,
    PAGE_SIZE,
    VOCAB,
    WorkerPair,
    expected,
    pair_of_workers,
    request,
)
from tests.waiting import until

from ferryman.cache.keys import page_keys, root_key
from ferryman.errors import InvalidRequest
from ferryman.schedule.batch import Sampled
from ferryman.schedule.request import Request
from ferryman.wire.codec.handoff import commit_order_to_wire
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.values import CommitOrder, PrefillOrder, ReserveOrder, Usage

VICTIM = [1, 2, 3, 4, 5, 6, 7, 8, 9]
OTHER = [9, 8, 7, 6, 5, 4, 3, 2, 1]


def under_other_keys(asked: Request) -> Request:
    return replace(asked, keys=request("r0", OTHER).keys)


def of_another_tenant(asked: Request) -> Request:
    salted = root_key(MANIFEST, b"another tenant")
    return replace(asked, keys=page_keys(salted, asked.token_ids, PAGE_SIZE))


def with_token(asked: Request, token_id: int) -> Request:
    ids = np.array([*VICTIM[:-1], token_id], dtype="<u4")
    return replace(asked, token_ids=ids, keys=page_keys(root_key(MANIFEST), ids, PAGE_SIZE))


FORGERIES: dict[str, tuple[Callable[[Request], Request], str]] = {
    "keys of another text": (under_other_keys, "page_keys"),
    "keys of another tenant": (of_another_tenant, "page_keys"),
    "too few keys": (lambda asked: replace(asked, keys=asked.keys[:-1]), "page_keys"),
    "no keys": (lambda asked: replace(asked, keys=()), "page_keys"),
    "too many keys": (lambda asked: replace(asked, keys=(*asked.keys, b"k" * 16)), "page_keys"),
    "a token beyond the vocabulary": (lambda asked: with_token(asked, VOCAB), "prompt"),
    "the greatest token there is": (lambda asked: with_token(asked, 2**32 - 1), "prompt"),
    "nothing left to generate": (lambda asked: replace(asked, num_generated=6), "num_generated"),
    "more tokens than fit": (lambda asked: request("r1", VICTIM, max_tokens=57), "max_tokens"),
}


async def order_at_prefill(pair: WorkerPair, asked: Request) -> None:
    await pair.run_prefill(pair.order(asked))


async def wish_at_decode(pair: WorkerPair, asked: Request) -> None:
    await pair.reserve(pair.wish(asked))


@pytest.mark.parametrize("ask", [order_at_prefill, wish_at_decode], ids=["at prefill", "at decode"])
@pytest.mark.parametrize("name", sorted(FORGERIES))
async def test_a_forged_order_is_refused_and_poisons_nothing(
    name: str, ask: Callable[..., object]
) -> None:
    forge, param = FORGERIES[name]
    honest = request("r1", VICTIM)
    async with pair_of_workers() as pair:
        with pytest.raises(InvalidRequest) as refused:
            await ask(pair, forge(honest))  # type: ignore[misc]
        assert refused.value.param == param
        await until(lambda: not pair.leased())
        again = replace(honest, request_id="r2")
        await pair.run_prefill(pair.order(again))
        assert pair.prefill.facts("admitted")[-1]["position"] == 0
        assert (await pair.read_tokens("r2"))[0] == expected(again)


async def test_a_tenants_own_keys_are_taken() -> None:
    async with pair_of_workers() as pair:
        asked = of_another_tenant(request("r1", VICTIM))
        order: PrefillOrder = pair.order(asked)
        order = replace(order, context=replace(order.context, tenant_salt=b"another tenant"))
        await pair.run_prefill(order)
        assert (await pair.read_tokens("r1"))[0] == expected(asked)


async def test_a_commit_with_a_token_beyond_the_vocabulary_is_refused() -> None:
    async with pair_of_workers() as pair:
        wish: ReserveOrder = pair.wish(request("r1", VICTIM))
        promise = await pair.reserve(wish)
        commit = CommitOrder(
            context=wish.context,
            reservation_id=promise.reservation_id,
            epoch=promise.epoch,
            written=(),
            digests=(),
            first=Sampled(VOCAB, {}),
            usage=Usage(len(VICTIM)),
        )
        with pytest.raises(InvalidRequest, match="vocabulary"), typed_errors():
            await pair.decode_stub.Commit(commit_order_to_wire(commit), timeout=120)
        assert pair.decode.engine.scheduler.statistics().decoding == 0
