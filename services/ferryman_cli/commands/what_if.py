"""The command that says which settings would help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ferryman_cli.commands.cluster import ConfigFile
from ferryman_cli.endpoints import (
    STATE_DIR,
    AsJson,
    CaFile,
    ClusterName,
    NatsUrl,
    StateDir,
    broker_place,
)
from ferryman_launcher.state_folder import running_cluster


def what_if(
    log: Annotated[
        Path | None,
        typer.Argument(metavar="[LOG]", help="A log in a file; by default the cluster's own."),
    ] = None,
    with_: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="SETTING=VALUE",
            help="Try this, such as host_memory=64G; several are tried alone and together.",
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="The latest so many of the log.")] = 1000,
    hours: Annotated[float, typer.Option(min=0.0, help="Of the last so many hours.")] = 24.0,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Begin no simulation after so long.")
    ] = 120.0,
    save: Annotated[
        str,
        typer.Option(metavar="FILE", help="Write log and settings there: a LOG for another time."),
    ] = "",
    model: Annotated[
        str, typer.Option(metavar="DIR", help="The model's folder, where the log names none.")
    ] = "",
    nats: NatsUrl = "",
    cluster: ClusterName = "",
    ca: CaFile = "",
    config: ConfigFile = "",
    state_dir: StateDir = STATE_DIR,
    json: AsJson = False,
) -> int:
    """Say which settings would have served the cluster's own log better; exit with 1 if the
    answer is not to be trusted.

    Simulates the log with the cluster as it is set, holds that against what was measured, then
    tries other settings. It changes nothing.
    """
    from ferryman_cli.running.what_if import WhatIfOptions, run_on_cluster, run_on_file
    from ferryman_simulator.what_if.selection import LogRange

    limits = LogRange(requests, hours * 3600)
    options = WhatIfOptions(tuple(with_ or ()), limits, seconds, model, config, save)
    if log is not None:
        return run_on_file(log, options, as_json=json)
    place = broker_place(nats, cluster, ca, state_dir)
    running = None if nats else running_cluster(state_dir)
    return run_on_cluster(place, running, options, as_json=json)
