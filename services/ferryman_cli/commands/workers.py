"""Commands about the workers of a running cluster."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from ferryman_cli.commands.completions import worker_ids
from ferryman_cli.endpoints import (
    STATE_DIR,
    AsJson,
    CaFile,
    ClusterName,
    NatsUrl,
    RouterCredentials,
    StateDir,
    Verbose,
    broker_place,
)
from ferryman_launcher.state_folder import down_processes


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False,
    verbose: Verbose = False,
    nats: NatsUrl = "",
    cluster: ClusterName = "",
    ca: CaFile = "",
    state_dir: StateDir = STATE_DIR,
    json: AsJson = False,
) -> int:
    """Show all workers, live: as many columns as fit, with --once -v all of them."""
    from ferryman_cli.top import run_top

    place = broker_place(nats, cluster, ca, state_dir)
    # A broker that the caller names may be that of another cluster than the folder's.
    down = partial(down_processes, state_dir) if not nats else dict[str, str]
    return run_top(place, down, once=once, is_verbose=verbose, as_json=json)


def drain(
    worker: Annotated[
        str,
        typer.Argument(
            metavar="WORKER", help="Its id, as `top` shows it.", autocompletion=worker_ids
        ),
    ],
    even_last: Annotated[
        bool, typer.Option("--even-last", help="Though no other worker does what it does.")
    ] = False,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Give the order, and do not wait for its end.")
    ] = False,
    nats: NatsUrl = "",
    cluster: ClusterName = "",
    credentials: RouterCredentials = None,
    ca: CaFile = "",
    state_dir: StateDir = STATE_DIR,
    json: AsJson = False,
) -> int:
    """Have a worker or a router take no new requests, finish those it has, and end.

    One that `ferryman up` started is then started again. A drain that takes longer than the
    worker's DRAIN_SECONDS is cut off, and its requests go on elsewhere.
    """
    from ferryman_cli.drain import DrainChoice, order_access, run_drain

    access = order_access(nats, cluster, credentials, state_dir, ca)
    choice = DrainChoice(worker, takes_last=even_last)
    return run_drain(access, choice, waits=not no_wait, as_json=json)


def roll(
    even_last: Annotated[
        bool,
        typer.Option("--even-last", help="Also the only router, or the only worker of a role."),
    ] = False,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1.0, help="How long one may take to come back.")
    ] = 600.0,
    nats: NatsUrl = "",
    cluster: ClusterName = "",
    credentials: RouterCredentials = None,
    ca: CaFile = "",
    state_dir: StateDir = STATE_DIR,
    json: AsJson = False,
) -> int:
    """Restart all workers, host-caches and routers, one at a time, while requests go on.

    Each is drained; whatever had started it starts it again. The only router is left alone.
    """
    from ferryman_cli.drain import order_access
    from ferryman_cli.roll import RollChoice, run_roll

    access = order_access(nats, cluster, credentials, state_dir, ca)
    return run_roll(access, RollChoice(even_last, seconds), as_json=json)
