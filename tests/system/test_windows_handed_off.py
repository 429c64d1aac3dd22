"""Windows from prefill to decode, by NIXL and by gRPC: token-identical, 1e-12, in float64.

gpt-oss with windows of 32 tokens in pages of 16: prompts of lengths around one and two windows, so
that what is handed over begins and ends everywhere within a page.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.harness.cluster import (
    FAST_PLANE,
    Cluster,
    ClusterShape,
    assert_same,
    generate,
    generate_all,
    on_plane,
    one_process,
    running_cluster,
    save_served_model,
)

from ferryman.client import Client
from ferryman.llm import Completion
from ferryman.schedule.request import SamplingParams
from ferryman.wire.plane_values import GRPC

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300),
]

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, logprobs=5, ignore_eos=True)
LENGTHS = (1, 15, 16, 17, 30, 31, 32, 33, 34, 46, 47, 48, 49, 50, 62, 63, 64, 65, 66, 79, 80, 97)
STEM = [(7 * i * i + 3 * i) % 120 + 3 for i in range(75)]
FORKS = [[*STEM[:66], *tail] for tail in ([5], [9] * 20, [11] * 3)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = save_served_model(tmp_path_factory.mktemp("model"), "gpt_oss")
    shape = ClusterShape(settings=on_plane(FAST_PLANE))
    with running_cluster(model, tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


def prompt(length: int) -> list[int]:
    """Prompts of two lengths have nothing in common."""
    return [(5 * i * i + 11 * i + 17 * length) % 120 + 3 for i in range(length)]


@pytest.fixture(scope="module")
def cold(cluster: Cluster) -> dict[tuple[int, ...], Completion]:
    """The answers of one process to all prompts, without a cache."""
    prompts = [*map(prompt, LENGTHS), STEM, *FORKS]
    with one_process(cluster.model) as llm:
        found = llm.generate(prompts, GREEDY)
    return {tuple(p): answer for p, answer in zip(prompts, found, strict=True)}


Cold = dict[tuple[int, ...], Completion]


async def test_windows_that_begin_anywhere_are_handed_over(cluster: Cluster, cold: Cold) -> None:
    await assert_exact(cluster, cold, FAST_PLANE)


async def test_what_decode_holds_of_a_window_is_not_sent_again(
    cluster: Cluster, cold: Cold
) -> None:
    """Forks of a stem that both have, then the same from the host tier, both devices empty."""
    async with Client(cluster.grpc) as client:
        assert_same(await generate(client, STEM, GREEDY), cold[tuple(STEM)])
        for fork, found in zip(FORKS, await generate_all(client, FORKS, GREEDY), strict=True):
            assert found.usage is not None
            assert found.usage.cached.device == 64
            assert_same(found, cold[tuple(fork)])
        await cluster.await_stored(STEM[:64])
        for role in ("prefill", "decode"):
            await cluster.flush_device(role)
        found = await generate(client, STEM, GREEDY)
        assert found.usage is not None
        assert found.usage.cached.host == 64
        assert_same(found, cold[tuple(STEM)])
    cluster.assert_ledgers_balance()


async def test_another_decode_worker_takes_them_by_grpc(cluster: Cluster, cold: Cold) -> None:
    """The last here: the first one leaves. Prefill has all prompts by now, decode has none."""
    (first,) = cluster.of_role("decode")
    first.stop()
    cluster.start("decode", settings={"planes": GRPC}).await_ready()
    cluster.await_workers(decode=1)
    await assert_exact(cluster, cold, GRPC)


async def assert_exact(cluster: Cluster, cold: Cold, plane: str) -> None:
    prompts = [prompt(length) for length in LENGTHS]
    async with Client(cluster.grpc) as client:
        last = f"{plane}-the-last"
        answers = await generate_all(client, prompts, GREEDY)
        answers.append(await generate(client, prompts[-1], GREEDY, request_id=last))
    for each, found in zip([*prompts, prompts[-1]], answers, strict=True):
        assert_same(found, cold[tuple(each)])
    assert await cluster.plane_of(last) == plane
    cluster.assert_ledgers_balance()
