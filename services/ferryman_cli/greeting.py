"""What `ferryman up` says when everything runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from ferryman.wire.subjects import Subjects
from ferryman_cli.host_plan import HostPlan, plan_line
from ferryman_cli.state_folder import DEFAULT, Cluster

QUESTION = "The red kite is in Oslo. The blue kite is in Lima.\nWhere is the red kite?"


def greeting(
    cluster: Cluster, state_dir: Path, program: str, plans: Iterable[HostPlan] = ()
) -> str:
    """Endpoints, and lines to try; `program` is how this command was called.

    Whoever pastes them again asks under another id: an id names one request.
    """
    body = {"model": cluster.model, "messages": [{"role": "user", "content": QUESTION}]}
    command = os.path.relpath(program) if "/" in program else program
    tiers = "".join(f"  tiers  {plan_line(plan)}\n" for plan in plans)
    where = "" if state_dir == DEFAULT.absolute() else f" --state-dir {state_dir}"
    return f"""Ferryman is up and serves {cluster.model}.

  HTTP   {cluster.http}/v1
  gRPC   {cluster.grpc}
  NATS   {cluster.nats}
  Redis  {cluster.redis}
  logs   {state_dir / "logs"}
{tiers}
Try in another terminal:

  ID=hello-$(date +%s)
  curl {cluster.http}/v1/chat/completions -H "x-request-id: $ID" \\
    -H 'content-type: application/json' -d '{json.dumps(body)}'
  {command} trace $ID{where}
  {command} chat{where}
  nats -s {cluster.nats} sub '{Subjects(cluster.name).all_life}'

Ctrl-C drains and ends everything."""
