"""`ferryman up` outlives its processes: no number of deaths and no full disk ends it.

The tests run in the order in which they stand here, on one cluster that has to live through them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.cluster import Up, name_of, up
from tests.waiting import wait_until

from ferryman_launcher.state_folder import running_cluster

NUM_DEATHS = 6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("state")) as cluster:
        yield cluster


def serving_pid(cluster: Up, name: str) -> int | None:
    """The child of `ferryman up` that bears this name, whatever cluster.json says."""
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            is_child = f"PPid:\t{cluster.process.pid}\n" in status.read_text()
            if is_child and name_of(int(status.parent.name)) == f"ferryman-{name}":
                return int(status.parent.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return None


def answers(cluster: Up, request_id: str) -> bool:
    """Whether a request gets its whole answer now."""
    try:
        return bool(cluster.complete(request_id)["usage"]["completion_tokens"])
    except AssertionError:
        return False


def await_death(cluster: Up, name: str, before: int) -> None:
    """Waits until cluster.json says that a process is down, or is another one."""
    wait_until(
        lambda: name in running_cluster(cluster.state_dir).down or cluster.pids[name] != before,
        f"the death of {name} to be known",
    )


def await_answer(cluster: Up) -> None:
    """Waits until a request is answered."""
    wait_until(lambda: answers(cluster, f"any-{os.urandom(4).hex()}"), "an answer", seconds=90)


def test_requests_are_answered_though_the_host_cache_dies_again_and_again(cluster: Up) -> None:
    for death in range(NUM_DEATHS):
        before = cluster.kill("hostcache")
        await_death(cluster, "hostcache", before)
        assert cluster.complete(f"without-{death}")["usage"]["completion_tokens"] > 0
        cluster.await_return("hostcache", before)
    assert not running_cluster(cluster.state_dir).down
    assert cluster.process.poll() is None


def test_a_worker_that_dies_again_and_again_comes_back_each_time(cluster: Up) -> None:
    for _ in range(NUM_DEATHS):
        cluster.await_return("decode", cluster.kill("decode"))
    await_answer(cluster)
    assert cluster.process.poll() is None


def test_a_full_disk_and_a_death_cost_the_cluster_no_more_than_lines(cluster: Up) -> None:
    draft = cluster.state_dir / "cluster.json.new"
    draft.symlink_to("/dev/full")
    for log in (cluster.state_dir / "logs").glob("*.log"):
        log.unlink()
        log.symlink_to("/dev/full")
    before = cluster.kill("decode")
    wait_until(
        lambda: serving_pid(cluster, "decode") not in (None, before), "its return", seconds=120
    )
    await_answer(cluster)
    assert cluster.pids["decode"] == before, "the disk is full, so the file is the older one"
    draft.unlink()
    cluster.await_return("decode", before)
    assert cluster.pids["decode"] == serving_pid(cluster, "decode")
    (cluster.state_dir / "logs" / "decode.log").unlink()
    cluster.await_return("decode", cluster.kill("decode"))


def test_it_says_all_of_that_and_ends_when_it_is_told_to(cluster: Up) -> None:
    ended = cluster.end()
    err = ended.stderr
    assert ended.status == 0, err
    for name, absence in (("hostcache", "requests are answered"), ("decode", "requests wait")):
        assert f"WARNING: {name} was ended by signal 9, death {NUM_DEATHS} in a row" in err
        assert f"{absence}, and" in err
        assert err.count(f"{name} is back") >= NUM_DEATHS
    assert err.count("cannot be written: No space left on device") == 1
    assert err.count("can be written again") == 1
