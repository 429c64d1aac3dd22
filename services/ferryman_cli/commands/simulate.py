"""The flags of `ferryman simulate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel

from ferryman.errors import ConfigError
from ferryman.settings.sources import Sources, read_settings
from ferryman_cli.commands.flags import with_flags
from ferryman_cli.endpoints import AsJson
from ferryman_launcher.options import flag_source
from ferryman_simulator.generator import Habits
from ferryman_simulator.modelled_time import CostModel
from ferryman_simulator.options import SimulateOptions

Trace = Annotated[Path | None, typer.Option(metavar="FILE", help="Requests, one a line.")]
Generate = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a made-up trace there, and end.")
]
Costs = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=SECONDS", help="What something takes; may be repeated."),
]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=A,B,…",
        help="Vary slots, grid, junctions, forks, host-memory or storage-bytes; may be repeated.",
    ),
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a PNG there.")]


@with_flags(SimulateOptions)
@with_flags(Habits)
def simulate(
    *,
    trace: Trace = None,
    generate: Generate = None,
    cost: Costs = None,
    sweep: Sweep = None,
    plot: Plot = None,
    json: AsJson = False,
    **flags: object,
) -> int:
    """Run a trace through the scheduler, the planner and the tiers without a model.

    Prints where prompt tokens would come from, why the others would be computed, and a predicted
    time to the first token. `--generate` makes a trace; docs/simulator.md says what is modelled.
    """
    from ferryman_simulator.run import run_generate, run_simulate

    if (trace is None) == (generate is None):
        raise ConfigError("give either --trace FILE or --generate FILE")
    choices = _with_model(read_settings(SimulateOptions, "", _given(SimulateOptions, flags)))
    if generate is not None:
        habits = read_settings(Habits, "", _given(Habits, flags))
        return run_generate(generate, habits, choices.block_tokens, as_json=json)
    assert trace is not None, "one of the two was given"
    costs = _costs(cost or ())
    return run_simulate(trace, choices, costs=costs, sweep=sweep or (), plot=plot, as_json=json)


def _given(kind: type[BaseModel], flags: Mapping[str, object]) -> Sources:
    return Sources((flag_source(kind, flags),))


def _with_model(choices: SimulateOptions) -> SimulateOptions:
    """The choices with the folder of the model whose state it is; by default the demo model's."""
    from ferryman_launcher.checks.model_places import described
    from ferryman_launcher.options import demo_model

    state = choices.state
    if state.has_bytes and not state.model:
        return choices
    folder = described(state.model) if state.model else demo_model()
    return choices.model_copy(update={"state": state.model_copy(update={"model": str(folder)})})


def _costs(texts: Sequence[str]) -> dict[str, float]:
    """Seconds by name, in place of the cost model's guesses."""
    names = [field.name for field in fields(CostModel)]
    changed: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            changed[name] = float(value)
        except ValueError:
            raise ConfigError(f"--cost {text}: it should be NAME=SECONDS") from None
        if name not in names:
            raise ConfigError(f"--cost {name}: names are {', '.join(names)}")
    return changed
