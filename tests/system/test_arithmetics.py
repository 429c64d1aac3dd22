"""A cluster whose workers compute in two arithmetics: one rank here, two ranks there.

Under `bits` neither reuses the other's state, wherever it lies, and says so; under `values` both
do, and answers are called so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path

import pytest
import torch
from tests.harness.cluster import (
    Cluster,
    ClusterShape,
    Generated,
    Service,
    generate,
    running_cluster,
    save_served_model,
)

from ferryman.cache.manifest import Exactness
from ferryman.client import Client, TokenChunk
from ferryman.ids import make_request_id
from ferryman.schedule.request import SamplingParams
from ferryman.wire.public import RouteExplanation
from ferryman_kernels.cpu.arithmetic import has_one_order

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not has_one_order(torch.float32), reason="bits are promised by compiled loops alone"
    ),
]

PROMPT = [(7 * i * i + 3 * i) % 120 + 3 for i in range(75)]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
TRIES, NUMBERS = 5, count()
LONG = SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_served_model(tmp_path_factory.mktemp("model"), "gemma3")


@contextmanager
def one_rank(model: Path, folder: Path, exactness: str) -> Iterator[Cluster]:
    """One worker, of one rank, which takes one request at a time."""
    shape = ClusterShape(
        num_prefill=0,
        num_decode=0,
        num_both=1,
        max_running=1,
        dtype="float32",
        settings={"both": {"exactness": exactness}},
    )
    with running_cluster(model, folder, shape) as cluster:
        cluster.await_attached()
        yield cluster


async def joined_by_two_ranks(cluster: Cluster, client: Client) -> Service:
    """The worker of two ranks, which comes when the first one has the prompt on its device, and the
    router knows."""
    async with asyncio.timeout(60):
        while True:
            name = make_request_id()
            await generate(client, PROMPT, GREEDY, request_id=name)
            (route,) = await client.explain(name)
            if route.chosen.device_tokens == 64:
                break
    other = cluster.start("both", settings={"tp_size": 2})
    await asyncio.to_thread(other.await_ready)
    await asyncio.to_thread(cluster.await_workers, prefill=2, decode=2)
    return other


async def asked_while_the_first_is_busy(
    client: Client, other: Service
) -> tuple[Generated, RouteExplanation]:
    """The answer to the prompt by the other worker, and its route: the one that holds the prompt
    has no row. On a busy machine that one may be done before the prompt is routed; then again."""
    for _ in range(TRIES):
        async with all_but(client, other.ready["worker_id"]):
            name = make_request_id()
            answer = await generate(client, PROMPT, GREEDY, request_id=name)
        (route,) = await client.explain(name)
        if route.chosen.prefill_worker_id == other.ready["worker_id"]:
            return answer, route
    raise AssertionError("the other worker was never asked")


@asynccontextmanager
async def all_but(client: Client, free: str) -> AsyncIterator[None]:
    """The worker that is not `free` is busy, with a prompt that has nothing in common with others.
    Where the router sends one to the free worker, another one goes to the rest."""
    async with AsyncExitStack() as at_free, AsyncExitStack() as elsewhere:
        while True:
            name = make_request_id()
            unlike = [next(NUMBERS) % 120 + 3, *PROMPT]
            busy = client.generate(unlike, LONG, deadline_seconds=200.0, request_id=name)
            async for event in busy:
                if isinstance(event, TokenChunk):
                    break
            (route,) = await client.explain(name)
            is_free = route.chosen.prefill_worker_id == free
            (at_free if is_free else elsewhere).push_async_callback(busy.aclose)
            if not is_free:
                break
        await at_free.aclose()
        yield


async def test_under_bits_a_prompt_of_another_arithmetic_is_computed_anew_and_says_why(
    model: Path, tmp_path: Path
) -> None:
    with one_rank(model, tmp_path, "bits") as cluster:
        async with Client(cluster.grpc) as client:
            other = await joined_by_two_ranks(cluster, client)
            found, route = await asked_while_the_first_is_busy(client, other)
            (card,) = await client.models()
        assert (route.chosen.usable_tokens, route.chosen.unlike_tokens) == (0, 64)
        assert found.usage is not None
        assert found.usage.cached.total == 0
        reasons = {each.reason: each.pages for each in found.usage.uncached}
        assert reasons == {"other_arithmetic": 4, "never_seen": 1}
        assert found.exactness is route.chosen.exactness is card.exactness is Exactness.BITS
        assert [name[-4:] for name in card.arithmetics] == ["/tp1", "/tp2"]
        assert "arithmetic: cpu/" in other.log.read_text(), (
            "the host-cache of its node is the other's"
        )
        cluster.assert_ledgers_balance()


async def test_under_values_it_is_loaded_and_the_answer_is_called_so(
    model: Path, tmp_path: Path
) -> None:
    with one_rank(model, tmp_path, "values") as cluster:
        async with Client(cluster.grpc) as client:
            other = await joined_by_two_ranks(cluster, client)
            await cluster.await_stored(PROMPT)
            found, route = await asked_while_the_first_is_busy(client, other)
            (card,) = await client.models()
        assert found.usage is not None
        assert found.usage.cached.host == 64
        assert found.exactness is route.chosen.exactness is card.exactness is Exactness.VALUES
        assert card.arithmetics == ("any",)
        cluster.assert_ledgers_balance()
