"""The commands of `ferryman`, gathered under one name, and the report of their errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from typer.exceptions import TyperException

from ferryman.errors import ConfigError, FerrymanError, InvalidRequest
from ferryman.runtime.life import EXIT_FAILED, EXIT_MISCONFIGURED
from ferryman.runtime.version import package_version
from ferryman_cli.commands.bench import bench_app
from ferryman_cli.commands.cluster import config, fit, up
from ferryman_cli.commands.doctor import doctor
from ferryman_cli.commands.keys import certs, container_credentials, credentials, key
from ferryman_cli.commands.local_cluster import down, logs, status
from ferryman_cli.commands.models import models
from ferryman_cli.commands.openai_server import serve, verify
from ferryman_cli.commands.requests import chat, events, explain, generate, trace
from ferryman_cli.commands.simulate import simulate
from ferryman_cli.commands.state import state_app
from ferryman_cli.commands.what_if import what_if
from ferryman_cli.commands.workers import drain, roll, top

EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="ferryman",
    help="Serve hybrid language models, with every reuse of state exact, explained and traceable.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for command in (
    *(up, status, logs, down),
    *(doctor, fit, config, models),
    *(chat, generate, trace, explain, events),
    *(simulate, what_if, verify),
    *(top, drain, roll),
    *(key, credentials, container_credentials, certs),
):
    app.command()(command)
bench_app.command()(serve)
app.add_typer(bench_app)
app.add_typer(state_app)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"ferryman {package_version()}")
        raise typer.Exit


@app.callback()
def ferryman(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    """Serve hybrid language models, with every reuse of state exact, explained and traceable."""


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs `ferryman`; as `run_app`."""
    return run_app(app, "ferryman", arguments)


def run_app(application: typer.Typer, name: str, arguments: Sequence[str]) -> int:
    """The exit status: 2 with one line on stderr for a mistake of the caller, 1 for a failure."""
    return reported(
        lambda: application(
            args=list(arguments) or ["--help"], prog_name=name, standalone_mode=False
        )
    )


def reported(command: Callable[[], object]) -> int:
    """The exit status of a command; its error has a line on stderr, as `run_app` says."""
    try:
        status = command()
    except TyperException as error:
        return _tell(error.format_message(), error.exit_code)
    except (ConfigError, InvalidRequest) as error:
        return _tell(str(error), EXIT_MISCONFIGURED)
    except FerrymanError as error:
        return _tell(str(error), EXIT_FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    return status if isinstance(status, int) else 0


def _tell(message: str, status: int) -> int:
    # Of several mistakes each has a line, as a service prints them.
    for mistake in message.split("\nerror: "):
        print(f"error: {' '.join(mistake.split())}", file=sys.stderr)
    return status
