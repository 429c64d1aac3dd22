"""`ferryman what-if` is held against clusters.

Conversations do not fit into the host tier; the cluster is started again with the setting that the
report names for that.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.harness.cluster import Up, up
from tests.waiting import wait_until

from ferryman_cli.app import run

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

# Before a conversation goes on, most others have spoken.
CONVERSATIONS, TURNS = 14, 60
LIKELY = [1 / (1 + number) for number in range(CONVERSATIONS)]
SMALL_POOLS = ("--memory-bytes", "6M", "--max-running", "2", "--storage-bytes", "0")
TOO_LITTLE = ("--host-memory", "1M")
POINTS = 0.05
BUSY = ("backlog_waiting", "store_leases", "store_reservations")


def conversations() -> list[list[int]]:
    """The prompts in order, as token ids; each goes on from the one before it of its own."""
    rng = random.Random(11)
    prompts: list[list[int]] = []
    so_far = [_words(rng, 150) for _ in range(CONVERSATIONS)]
    for number in rng.choices(range(CONVERSATIONS), LIKELY, k=TURNS):
        so_far[number] += _words(rng, 30)
        prompts.append(list(so_far[number]))
    return prompts


def _words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(100, 400) for _ in range(count)]


def serve(cluster: Up) -> None:
    """All prompts, one after the other; each when the host-cache has stored what was before."""
    for prompt in conversations():
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{cluster.doors[0]}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        wait_until(lambda: is_idle(cluster), "the host-cache to be idle", seconds=120)


def is_idle(cluster: Up) -> bool:
    """True if the host-cache has nothing more to do."""
    for line in cluster.log("hostcache").splitlines():
        if line.startswith('{"event": "ready"'):
            address = json.loads(line)["observe"]
    answer = httpx.get(f"http://{address}/metrics", headers=cluster.as_observer, timeout=120)
    lines = [line.split() for line in answer.text.splitlines() if not line.startswith("#")]
    busy = [float(value) for name, value in lines if name.endswith(BUSY)]
    assert busy, "it has no such gauge"
    return not any(busy)


def what_if(cluster: Up, capsys: pytest.CaptureFixture[str], *flags: str) -> Mapping[str, Any]:
    """The report of a running cluster; a busy machine may spoil the times, and the status."""
    run(["what-if", "--state-dir", str(cluster.state_dir), "--json", "--seconds", "300", *flags])
    report: Mapping[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_the_setting_that_it_names_gives_the_reuse_that_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with up(tmp_path / "before", *SMALL_POOLS, *TOO_LITTLE) as cluster:
        serve(cluster)
        report = what_if(cluster, capsys)
    assert_like(report["simulated"], report["measured"])
    (gain,) = [gain for gain in report["gains"] if names_of(gain) == ["host_memory"]][:1]
    assert gain["reused"] > report["measured"]["reused"] + 0.2, "it was meant to matter"
    (change,) = gain["changes"]
    with up(tmp_path / "after", *SMALL_POOLS, *change["flag"].split()) as cluster:
        serve(cluster)
        after = what_if(cluster, capsys, "--with", f"host_memory={change['after']}")
    assert_like(gain, after["measured"])


def names_of(gain: Mapping[str, Any]) -> Sequence[str]:
    return [change["setting"] for change in gain["changes"]]


def assert_like(simulated: Mapping[str, Any], measured: Mapping[str, Any]) -> None:
    for tier, share in measured["shares"].items():
        assert abs(simulated["shares"][tier] - share) <= POINTS, f"{simulated}, {measured}"
