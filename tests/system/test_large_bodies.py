"""Bodies of the largest size beside running streams: each has its answer, and no stream waits."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from tests.harness.cluster import Cluster, ClusterShape, running_cluster
from tools.campaigns.body_sender import BODIES, SEND_SECONDS, refused
from tools.campaigns.large_bodies import largest_gap, num_long_holds, warmed

from ferryman_launcher.options import demo_model

pytestmark = [pytest.mark.system, pytest.mark.timeout(3 * SEND_SECONDS)]

TRIES = 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = {"router": {"deadline_seconds": SEND_SECONDS + 100}}
    shape = ClusterShape(dtype="float32", memory_bytes=64 << 20, settings=settings)
    with running_cluster(demo_model(), tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


@pytest.mark.slow
async def test_no_stream_waits_for_bodies_of_the_largest_size(cluster: Cluster) -> None:
    await warmed(cluster)
    found = []
    for _ in range(TRIES):  # a machine that is busy for a moment is no body's fault
        before = await num_long_holds(cluster)
        largest = await largest_gap(cluster, with_bodies=True)
        num_holds = await num_long_holds(cluster) - before
        # The gaps are those of a machine that others use too; what the router itself does to its
        # streams is that it holds up its loop, or not. The campaign looks at the gaps.
        if num_holds == 0:
            break
        found.append((largest, await largest_gap(cluster, with_bodies=False), num_holds))
    else:
        pytest.fail(f"largest gaps with and without bodies, and long holds: {found}")


@pytest.mark.parametrize("name", BODIES)
async def test_each_is_refused_with_a_type(cluster: Cluster, name: str) -> None:
    async with httpx.AsyncClient(base_url=cluster.http, timeout=SEND_SECONDS) as http:
        await refused(http, *BODIES[name])
