"""Commands for a whole cluster: start it, or show what a start would do."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated

import typer

from ferryman.hub.models import described_by_head
from ferryman.settings.cluster import UpOptions
from ferryman_cli.commands.flags import with_flags
from ferryman_cli.endpoints import (
    AsJson,
)
from ferryman_launcher.checks.model_places import locate
from ferryman_launcher.options import UP_DEFAULTS, check_model_folder, up_options, up_sources

ConfigFile = Annotated[
    str, typer.Option(metavar="FILE", help="A TOML file of settings. [env: FERRYMAN_CONFIG]")
]


@with_flags(UpOptions, UP_DEFAULTS)
def up(
    *,
    config: ConfigFile = "",
    json: Annotated[
        bool, typer.Option("--json", help="Say that it is ready in one line of JSON.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when it is ready; `ferryman down` ends it.")
    ] = False,
    **flags: object,
) -> int:
    """Start a cluster and stay in the foreground; Ctrl-C drains and ends it.

    Endpoints and process ids are in cluster.json of the state folder, where the other commands
    look; logs are beside it. Every flag is a variable, too (FERRYMAN_PAGE_SIZE), and a line of the
    file (page_size = 16); flags count more than variables, and those more than the file.
    """
    sources, places = locate(up_sources(flags, os.environ, config))
    choices = up_options(sources)
    check_model_folder(choices.engine.model)

    if not detach:
        from ferryman_cli.up import run_up

        return run_up(choices, places, as_json=json)

    from ferryman_cli.running.detach import run_detached
    from ferryman_launcher.state_folder import StateFolder

    def start(release: Callable[[], None]) -> int:
        from ferryman_cli.up import run_up

        return run_up(choices, places, as_json=json, release=release)

    return run_detached(StateFolder(choices.state_dir), start)


@with_flags(UpOptions, UP_DEFAULTS)
def fit(
    *,
    asked: Annotated[str, typer.Argument(metavar="[MODEL]", help="As --model.")] = "",
    config: ConfigFile = "",
    json: AsJson = False,
    **flags: object,
) -> int:
    """Show what fits into this machine, and start nothing.

    Weights, state and requests of the cluster that `ferryman up` with these flags would start, from
    the model's config and the headers of its files.
    """
    named = {**flags, "model": asked or flags["model"]}
    sources, places = locate(up_sources(named, os.environ, config), described_by_head)
    choices = up_options(sources)
    check_model_folder(choices.engine.model)

    from ferryman_cli.fit import run_fit

    return run_fit(choices, places, as_json=json)


@with_flags(UpOptions, UP_DEFAULTS)
def config(
    *,
    show: Annotated[
        bool, typer.Option("--show", help="Print every setting with where it comes from.")
    ] = False,
    config: ConfigFile = "",
    json: Annotated[bool, typer.Option("--json", help="Print JSON, as with --show.")] = False,
    **flags: object,
) -> int:
    """Check the settings of a cluster, as `ferryman up` with these flags would have them."""
    from ferryman_cli.config import config_values, planned_values, print_values

    sources, places = locate(up_sources(flags, os.environ, config), described_by_head)
    planned = planned_values(up_options(sources), places) if show or json else {}
    values = list(config_values(sources, planned))
    if show or json:
        print_values(values, as_json=json)
    return 0
