"""Commands about the cluster that `ferryman up` runs on this machine."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ferryman_cli.commands.completions import log_names
from ferryman_cli.endpoints import STATE_DIR, AsJson, StateDir


def status(state_dir: StateDir = STATE_DIR, json: AsJson = False) -> int:
    """Show the cluster's endpoints and processes; exit with 1 unless all is well."""
    from ferryman_cli.running.status import run_status

    return run_status(state_dir, as_json=json)


def logs(
    service: Annotated[
        str,
        typer.Argument(
            metavar="[SERVICE]",
            help="As `status` names it, or up; all without.",
            autocompletion=log_names,
        ),
    ] = "",
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on with new lines, across restarts.")
    ] = False,
    lines: Annotated[
        int, typer.Option("-n", "--lines", min=0, help="Begin with so many of each log.")
    ] = 40,
    state_dir: StateDir = STATE_DIR,
    json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object for each line.")
    ] = False,
) -> int:
    """Print the end of the processes' logs."""
    from ferryman_cli.running.logs import json_form, named_form, plain_form, run_logs

    form = json_form if json else plain_form if service else named_form
    return run_logs(state_dir, service, form, number=lines, follows=follow, out=sys.stdout)


def down(
    now: Annotated[
        bool, typer.Option("--now", help="Kill what has not drained after a moment.")
    ] = False,
    state_dir: StateDir = STATE_DIR,
    json: AsJson = False,
) -> int:
    """Drain and end the cluster, as Ctrl-C would, and wait for its end."""
    from ferryman_cli.running.down import run_down

    return run_down(state_dir, now=now, as_json=json)
