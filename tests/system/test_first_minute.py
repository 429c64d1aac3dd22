"""The first minute of a cluster, and the one behind the death of its only decode worker: whoever
asks then is answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.harness.cluster import starting, up
from tests.waiting import wait_until

from ferryman.runtime.embedded import free_ports

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

# As in the README.
QUESTION = (
    "The red kite is in Oslo. A fox sleeps in the night. The blue kite is in Lima. "
    "Where is the red kite?"
)
ANSWER = "The red kite is in Oslo."
SECONDS = 300.0  # a default deadline, on a busy machine


def ask(http: str, **headers: str) -> httpx.Response:
    body: dict[str, Any] = {
        "model": "ferryman-demo",
        "messages": [{"role": "user", "content": QUESTION}],
    }
    return httpx.post(f"{http}/v1/chat/completions", json=body, headers=headers, timeout=SECONDS)


def is_open(http: str) -> bool:
    try:
        return httpx.get(f"{http}/health", timeout=SECONDS).status_code == 200
    except httpx.TransportError:
        return False


def test_a_question_in_the_first_start_is_answered_once_there_are_workers(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    http = f"http://127.0.0.1:{port}"
    no_loop_is_compiled = {"NUMBA_CACHE_DIR": str(tmp_path / "loops")}
    with starting(tmp_path, "--http-port", str(port), **no_loop_is_compiled) as cluster:
        wait_until(lambda: is_open(http), "the open door", seconds=240)
        readiness = httpx.get(f"{http}/ready", timeout=SECONDS)
        assert (readiness.status_code, readiness.json()["status"]) == (503, "starting")
        hasty = ask(http, **{"x-ferryman-deadline-ms": "100"})
        assert (hasty.status_code, hasty.json()["error"]["code"]) == (503, "no_worker")
        assert "the cluster is starting" in hasty.json()["error"]["message"]
        assert int(hasty.headers["retry-after"]) >= 1
        answer = ask(http)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == ANSWER
        usage = answer.json()["usage"]
        # The page size was not known yet when the request came.
        assert usage["ferryman"]["uncached_reasons"] == {"never_seen": usage["prompt_tokens"]}
        assert cluster.process.poll() is None


def test_a_question_behind_the_death_of_the_only_decode_worker_is_answered(tmp_path: Path) -> None:
    with up(tmp_path) as cluster:
        before = cluster.kill("decode")
        answer = ask(cluster.doors[0])
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == ANSWER
        readiness = cluster.readiness()
        assert (readiness["workers"]["decode"], readiness["starts"]) == (1, [])
        cluster.await_return("decode", before)
