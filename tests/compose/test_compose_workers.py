"""The image of `test_compose_up` once more: workers that do both, which Prometheus watches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.compose.composed_cluster import STAYING, ComposedCluster, composed_cluster
from tests.compose.conftest import WHEELS
from tests.compose.container_engine import ContainerEngine
from tests.compose.test_compose_up import ANSWER, chat, stream_of_a_killed_worker
from tests.deploy.shipped_metrics import alerts
from tests.waiting import wait_until

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

SCRAPED_SECONDS = 120


@pytest.fixture(scope="module")
def by_both(engine: ContainerEngine, tree: Any) -> Iterator[ComposedCluster]:
    files = {"COMPOSE_FILE": "compose.yaml:compose.both.yaml", "COMPOSE_PROFILES": "observe"}
    offline = {"PIP_NO_INDEX": "1"} if (tree / WHEELS).is_dir() else {}
    with composed_cluster(engine, tree, DTYPE="float64", **files, **offline) as cluster:
        # Grafana has no stand-in. The router is named, so that all that it needs is there. The
        # third worker comes when the first two have compiled the loops of all.
        cluster.up("router", "prometheus")
        cluster.up("--scale", "decode=2", "router", "prometheus")
        yield cluster


def ask_prometheus(cluster: ComposedCluster, path: str) -> Any:
    url = f"http://127.0.0.1:{cluster.choices['PROMETHEUS_PORT']}/api/v1/{path}"
    return httpx.get(url, timeout=10).raise_for_status().json()["data"]


def test_workers_that_do_both_are_healthy_and_answer_as_one_process(
    by_both: ComposedCluster,
) -> None:
    healthy = Counter(
        each["Service"] for each in by_both.containers() if each["Health"] == "healthy"
    )
    assert healthy == {**dict.fromkeys(STAYING, 1), "decode": 2, "prometheus": 1}
    workers = [*by_both.names_of("prefill"), *by_both.names_of("decode")]
    assert {by_both.ready_line(name)["role"] for name in workers} == {"both"}
    assert chat(by_both) == ANSWER


def test_prometheus_reads_every_service_by_the_shipped_files(by_both: ComposedCluster) -> None:
    def scraped() -> Counter[str]:
        targets = ask_prometheus(by_both, "targets")["activeTargets"]
        return Counter(each["scrapePool"] for each in targets if each["health"] == "up")

    wanted = {"router": 1, "prefill": 1, "decode": 2, "hostcache": 1}
    wait_until(lambda: scraped() == wanted, "all targets", scraped, SCRAPED_SECONDS)
    groups = ask_prometheus(by_both, "rules")["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert set(rules) == {each["alert"] for each in alerts()}
    assert {rule["health"] for rule in rules.values()} <= {"ok", "unknown"}
    sums = ask_prometheus(by_both, "query?query=sum(ferryman_router_requests_total)")["result"]
    assert sums


async def test_a_stream_goes_on_when_the_worker_of_both_that_has_it_is_killed(
    by_both: ComposedCluster,
) -> None:
    names = [*by_both.names_of("prefill"), *by_both.names_of("decode")]
    await stream_of_a_killed_worker(by_both, names)
