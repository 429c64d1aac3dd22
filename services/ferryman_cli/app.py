"""The commands of `ferryman`, gathered under one name."""

from __future__ import annotations

import typer

app = typer.Typer(
    name="ferryman",
    help="Serve hybrid language models, with every reuse of state exact, explained and traceable.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def ferryman() -> None:
    """Serve hybrid language models, with every reuse of state exact, explained and traceable."""


def main() -> None:
    app()
