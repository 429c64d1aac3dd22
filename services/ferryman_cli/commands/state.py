"""The commands of `ferryman state`: a conversation's state as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ferryman_cli.endpoints import (
    STATE_DIR,
    ApiKey,
    AsJson,
    CaFile,
    GrpcAddress,
    RequestId,
    StateDir,
    door_place,
)

StatePath = Annotated[Path, typer.Argument(metavar="FILE", help="A state file, such as kite.fst.")]

state_app = typer.Typer(name="state", rich_markup_mode=None)


@state_app.callback(invoke_without_command=True)
def state(context: typer.Context) -> None:
    """Save a conversation's state to a file, load it elsewhere, or show what a file holds."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@state_app.command()
def save(
    request_id: RequestId,
    file: StatePath,
    grpc: GrpcAddress = "",
    api_key: ApiKey = "",
    ca: CaFile = "",
    state_dir: StateDir = STATE_DIR,
    json: AsJson = False,
) -> int:
    """Write the state of a late request to a new file."""
    from ferryman_cli.state.transfers import run_save

    door = door_place(grpc, ca, state_dir)
    return run_save(door, request_id, file, api_key=api_key, as_json=json)


@state_app.command()
def load(
    file: StatePath,
    grpc: GrpcAddress = "",
    api_key: ApiKey = "",
    ca: CaFile = "",
    state_dir: StateDir = STATE_DIR,
    json: AsJson = False,
) -> int:
    """Give the state of a file to a cluster, for requests that begin with its tokens."""
    from ferryman_cli.state.transfers import run_load

    return run_load(door_place(grpc, ca, state_dir), file, api_key=api_key, as_json=json)


@state_app.command()
def show(file: StatePath, json: AsJson = False) -> int:
    """Say whose state a file holds, without any cluster; exit with 1 if it is damaged."""
    from ferryman_cli.state.transfers import run_show

    return run_show(file, as_json=json)
