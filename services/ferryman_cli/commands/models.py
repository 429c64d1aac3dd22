"""The command about the models that can be served."""

from __future__ import annotations

from typing import Annotated

import typer

from ferryman_cli.endpoints import AsJson


def models(
    *,
    word: Annotated[
        str,
        typer.Argument(
            metavar="[WORD]",
            help="A part of a name, such as granite, or the path of a folder or a GGUF file.",
        ),
    ] = "",
    json: AsJson = False,
) -> int:
    """List the architectures that can be served, with the kinds of state and the weight formats.

    The name to look for is the one in "architectures" of the model's config.json. A path lists that
    model's family, or says why it is not read.
    """
    from ferryman_cli.models import run_models

    return run_models(word, as_json=json)
