"""The lines that a newcomer is given to try."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

from ferryman_cli.up_display import banner, page_line, page_url
from ferryman_launcher.checks.cluster_memory import plan_memory, worker_line
from ferryman_launcher.host_plan import HostPlan
from ferryman_launcher.options import up_options, up_sources
from ferryman_launcher.state_folder import DEFAULT, RunningCluster

CLUSTER = RunningCluster("http://h:1", "h:2", "nats://h:3", "redis://h:4/0", "blue", "demo", 77)


def test_the_lines_can_be_pasted_into_a_shell() -> None:
    said = banner(CLUSTER, DEFAULT.absolute(), "ferryman")
    _, _, rest = said.partition("  curl ")
    words = shlex.split("curl " + rest.partition("\n  ferryman trace")[0])
    assert words[1] == "http://h:1/v1/chat/completions"
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "demo"
    assert "\n  ferryman trace $ID\n" in said
    assert "\n  ferryman chat\n" in said
    assert ".ferryman/nats.url)\" sub 'ferryman.v1.blue.life.>'" in said


def test_it_says_how_memory_is_split_and_what_fits() -> None:
    pools = {"full": 96 << 20, "recurrent": 160 << 20}
    plans = [
        HostPlan("node-1", 256 << 20, pools, 40_960, 22, 2 << 30),
        HostPlan("node-2", 256 << 20, {}, 0, 0, 0),
    ]
    said = banner(CLUSTER, DEFAULT.absolute(), "ferryman", plans)
    assert (
        "node-1: 256M of host memory = 96M full + 160M recurrent: 40,960 tokens, 22 snapshots; "
        "storage: 2G\n"
    ) in said
    assert "node-2: 256M of host memory, which no worker uses: see hostcache's log" in said


def test_every_router_is_named() -> None:
    two = replace(CLUSTER, http="http://h:1,http://h:3", grpc="h:2,h:4")
    said = banner(two, DEFAULT.absolute(), "ferryman")
    assert "  HTTP   http://h:1/v1\n         http://h:3/v1\n  gRPC   h:2,h:4\n" in said
    assert "  curl http://h:1/v1/chat/completions " in said


def test_the_page_is_named_with_the_key_that_its_fleet_wants() -> None:
    locked, where = up_options(up_sources({}, {})), DEFAULT.absolute()
    line = page_line(CLUSTER, locked, where)
    assert line == f"  page   http://h:1/ (the fleet: key in {where}/metrics.token)\n"
    said = banner(CLUSTER, where, "ferryman", page=line)
    assert f"  HTTP   http://h:1/v1\n{line}  gRPC   h:2\n" in said


def test_an_open_cluster_names_its_page_alone_and_one_without_a_page_none() -> None:
    is_open, none = (
        up_options(up_sources(flags, {})) for flags in ({"insecure": True}, {"web_page": False})
    )
    assert page_line(CLUSTER, is_open, DEFAULT) == "  page   http://h:1/\n"
    assert page_line(CLUSTER, none, DEFAULT) == page_url(CLUSTER, none) == ""
    assert "  page " not in banner(CLUSTER, DEFAULT.absolute(), "ferryman")


def test_another_state_folder_is_named_in_every_line(tmp_path: Path) -> None:
    said = banner(CLUSTER, tmp_path, "ferryman")
    assert f"ferryman trace $ID --state-dir {tmp_path}" in said
    assert f"ferryman chat --state-dir {tmp_path}" in said


def test_it_says_what_each_worker_runs_in_and_what_fits() -> None:
    memory = plan_memory(up_options(up_sources({"memory": "4G", "decode": "2"}, {})))
    said = banner(CLUSTER, DEFAULT.absolute(), "ferryman", (), map(worker_line, memory.workers))
    assert "  memory prefill: float32 on cpu, 4.2M of weights + " in said
    assert "  memory 2 × decode: float32 on cpu, " in said
    assert "requests up to 8,192 tokens, 32 at 4,096\n" in said
