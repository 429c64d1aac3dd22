"""The command that looks for faults."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ferryman.hub.models import described_by_head
from ferryman_cli.commands.cluster import ConfigFile
from ferryman_cli.endpoints import (
    STATE_DIR,
    AsJson,
    CaFile,
    ClusterName,
    NatsUrl,
    RouterCredentials,
    StateDir,
)
from ferryman_launcher.checks.model_places import locate
from ferryman_launcher.options import up_options, up_sources

RedisUrl = Annotated[str, typer.Option("--redis", metavar="URL", help="The cluster's index.")]


def doctor(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="A model folder to look at; as --model of up.")
    ] = "",
    nats: NatsUrl = "",
    redis: RedisUrl = "",
    cluster: ClusterName = "",
    credentials: RouterCredentials = None,
    ca: CaFile = "",
    config: ConfigFile = "",
    state_dir: StateDir = STATE_DIR,
    json: AsJson = False,
) -> int:
    """Look for what is wrong, and say what mends it; exit with 1 if something breaks.

    Of a cluster that runs here, of one that --nats names, or (before anything runs) of this machine
    and a model folder alone. It changes nothing.
    """
    from ferryman_cli.doctor.command import DoctorPlace, run_doctor

    sources, places = locate(up_sources({"model": model}, os.environ, config), described_by_head)
    place = DoctorPlace(nats, redis, cluster, credentials, ca, state_dir, model)
    return run_doctor(up_options(sources), places, place, as_json=json)
