"""A worker is killed under many streams: every answer is whole, or says how far it came, and why.

The tests run in the order in which they stand here, on one cluster that has to live through them.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import httpx
import pytest
from tests.harness.cluster import (
    PAGE_SIZE,
    Cluster,
    ClusterShape,
    running_cluster,
    save_served_model,
)
from tests.system.many_streams import (
    Frames,
    Streams,
    answers_though_disturbed,
    undisturbed,
)
from tests.waiting import wait_until

from ferryman.llm import LLM
from ferryman.schedule.request import SamplingParams
from ferryman.settings.router import LimitSettings
from ferryman.wire.nats.subjects import Subjects

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STREAMS = 64


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = save_served_model(tmp_path_factory.mktemp("model"), "granite_nope")
    # One decode worker alone has not enough rows for all streams: some have to wait.
    shape = ClusterShape(num_prefill=2, num_decode=2, max_running=40, memory_bytes=192 << 20)
    with running_cluster(model, tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


async def test_the_streams_of_a_killed_decode_worker_all_go_on_elsewhere(cluster: Cluster) -> None:
    prompts = [[(7 * i + 3 * n) % 120 + 3 for i in range(20 + n % 9)] for n in range(NUM_STREAMS)]
    wanted = undisturbed(cluster, prompts)
    streams = Streams(wanted=NUM_STREAMS // 2, far=3)
    victim = cluster.of_role("decode")[0]
    answers, num_moved = await answers_though_disturbed(cluster, victim.kill, prompts, streams)
    assert num_moved > NUM_STREAMS * LimitSettings().retry_share, "more than the budget allows"
    assert answers == wanted
    cluster.start("decode").await_ready()
    cluster.await_workers(prefill=2, decode=2)
    cluster.assert_ledgers_balance()


async def test_the_streams_of_a_hung_decode_worker_go_on_and_it_is_believed_again(
    cluster: Cluster,
) -> None:
    prompts = [[(9 * i + 5 * n) % 120 + 3 for i in range(24 + n % 5)] for n in range(16)]
    wanted = undisturbed(cluster, prompts)
    victim = cluster.of_role("decode")[0]
    answers, num_moved = await answers_though_disturbed(
        cluster,
        lambda: victim.process.send_signal(signal.SIGSTOP),
        prompts,
        Streams(wanted=8, far=3),
    )
    assert num_moved > 0, "it was decoding some of them"
    assert answers == wanted
    cluster.await_workers(prefill=2, decode=1)
    victim.process.send_signal(signal.SIGCONT)
    cluster.await_workers(prefill=2, decode=2)


async def test_the_prompts_of_a_killed_prefill_worker_are_all_computed_elsewhere(
    cluster: Cluster,
) -> None:
    num_prompts = NUM_STREAMS // 2
    prompts = [[(5 * i + 11 * n) % 120 + 3 for i in range(300 + n)] for n in range(num_prompts)]
    wanted = undisturbed(cluster, prompts)
    victim = cluster.of_role("prefill")[0]
    chunks = f"{Subjects().root}.life.prefill.{victim.ready['worker_id']}.*.chunk"
    streams = Streams()
    async with cluster.bus() as bus, bus.subscribed(chunks) as messages:

        async def begin() -> None:
            await anext(messages)
            streams.many.set()

        beginning = asyncio.create_task(begin())
        answers, num_moved = await answers_though_disturbed(cluster, victim.kill, prompts, streams)
        await beginning
    assert num_moved > 0, "it was at work on some prompt"
    assert answers == wanted
    cluster.start("prefill").await_ready()
    cluster.await_workers(prefill=2, decode=2)
    cluster.assert_ledgers_balance()


async def test_with_the_last_decode_worker_gone_a_stream_ends_typed_or_goes_on_when_one_is_back(
    cluster: Cluster,
) -> None:
    """Two routers with different patience, one stream each."""
    patience = {"no_worker_seconds": 240.0}
    patient = cluster.start("router", settings=patience)
    patient.await_ready()
    hasty, prompt, max_tokens = cluster.http, [7, 8, 9, 10, 11] * 5, 600
    url = f"http://{patient.ready['http']}"
    wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200, "the other router")
    while True:  # until both have begun and neither is near its end
        ending, waiting = Frames(hasty), Frames(url)
        reading = [asyncio.create_task(one.read(prompt, max_tokens)) for one in (ending, waiting)]
        await asyncio.gather(ending.has_begun.wait(), waiting.has_begun.wait())
        if max(len(ending.words), len(waiting.words)) < max_tokens // 2:
            break
        await asyncio.gather(*reading)
    for worker in cluster.of_role("decode"):
        worker.kill()
    async with asyncio.timeout(120):  # its patience is 10 s and a start
        await reading[0]
    error = ending.said[-1]["error"]
    assert (error["reason"], error["retryable"]) == ("NoWorker", True)
    assert error["offset"] == len(ending.words) > 0
    assert error["stage"] in ("committed", "decoding", "migrating")
    assert not reading[1].done(), "the other router is more patient"
    cluster.start("decode").await_ready()
    await reading[1]
    with LLM(cluster.model, dtype="float64", page_size=PAGE_SIZE, memory_bytes=1 << 28) as llm:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        (whole,) = llm.generate([prompt], sampling)
    assert waiting.words == [f"w{token_id}" for token_id in whole.token_ids]
    assert ending.words == waiting.words[: len(ending.words)]
    patient.stop()
