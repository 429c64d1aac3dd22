"""The first words of `ferryman up`: the endpoints of a cluster and lines to try, or JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ferryman.wire.nats.subjects import Subjects
from ferryman_launcher.checks.check_apart import CheckedCluster
from ferryman_launcher.host_plan import HostPlan, plan_line
from ferryman_launcher.state_folder import DEFAULT, NATS_URL, RunningCluster, StateFolder

QUESTION = "The red kite is in Oslo. The blue kite is in Lima.\nWhere is the red kite?"

Announce = Callable[[RunningCluster, Sequence[HostPlan]], None]


def banner(
    cluster: RunningCluster,
    state_dir: Path,
    program: str,
    plans: Iterable[HostPlan] = (),
    workers: Iterable[str] = (),
) -> str:
    """Endpoints, and lines to try; `program` is the path of this command, `workers` are lines.

    The pasted lines use a new id each time, because an id names one request.
    """
    body = {"model": cluster.model, "messages": [{"role": "user", "content": QUESTION}]}
    command = os.path.relpath(program) if "/" in program else program
    tiers = "".join(f"  memory {worker}\n" for worker in workers)
    tiers += "".join(f"  tiers  {plan_line(plan)}\n" for plan in plans)
    # Tools of others do not look for the authority in the state folder.
    curl = f"curl --cacert {os.path.relpath(cluster.ca)}" if cluster.ca else "curl"
    nats = f"nats --tlsca {os.path.relpath(cluster.ca)}" if cluster.ca else "nats"
    http = "\n         ".join(f"{url}/v1" for url in cluster.http_urls)
    where = "" if state_dir == DEFAULT.absolute() else f" --state-dir {state_dir}"
    return f"""Ferryman is up and serves {cluster.model}.

  HTTP   {http}
  gRPC   {cluster.grpc}
  NATS   {cluster.nats}
  Redis  {cluster.redis}
  logs   {state_dir / "logs"}
{tiers}
Try in another terminal:

  ID=hello-$(date +%s)
  {curl} {cluster.http_urls[0]}/v1/chat/completions -H "x-request-id: $ID" \\
    -H 'content-type: application/json' -d '{json.dumps(body)}'
  {command} trace $ID{where}
  {command} chat{where}
  {nats} -s "$(cat {os.path.relpath(state_dir / NATS_URL)})" sub '{Subjects(cluster.name).all_life}'

Ctrl-C drains and ends everything."""


def json_announcer(checked: CheckedCluster) -> Announce:
    """Prints one line of JSON, for programs."""

    def announce(cluster: RunningCluster, plans: Sequence[HostPlan]) -> None:
        line: Mapping[str, object] = {
            "event": "ready",
            "http": cluster.http,
            "grpc": cluster.grpc,
            "nats": cluster.nats,
            "redis": cluster.redis,
            "pids": dict(cluster.pids),
            "memory": checked.objects,
            "tiers": [asdict(plan) for plan in plans],
        }
        print(json.dumps(line), flush=True)

    return announce


def text_announcer(folder: StateFolder, checked: CheckedCluster) -> Announce:
    """Prints the banner, for people."""

    def announce(cluster: RunningCluster, plans: Sequence[HostPlan]) -> None:
        text = banner(cluster, folder.path, sys.argv[0], plans, checked.lines)
        print(text, flush=True)

    return announce
