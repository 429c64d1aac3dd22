"""The flags of `ferryman bench`, `ferryman bench core` and `ferryman bench tiers`."""

from __future__ import annotations

from typing import Annotated

import typer

from ferryman_cli.where import AsJson

bench_app = typer.Typer(
    name="bench",
    help="Measure this machine: the model against transformers, the core, or the tiers.",
    rich_markup_mode=None,
)


@bench_app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    model_shape: Annotated[str, typer.Option(help="Architecture with random weights.")] = (
        "granite-100m"
    ),
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    threads: Annotated[int, typer.Option(min=1, help="Threads of either side.")] = 2,
    repeats: Annotated[int, typer.Option(min=2, help="Decode steps timed at each batch.")] = 24,
    json: AsJson = False,
) -> int:
    """Measure decode, prefill and a hand-off on random weights, against transformers.

    Both sides run in turn in one process; ratios are those of the best step of each.
    """
    if context.invoked_subcommand is not None:
        return 0
    from ferryman_cli.bench.model import BenchChoices, run_bench

    return run_bench(BenchChoices(model_shape, dtype, threads, repeats), as_json=json)


@bench_app.command()
def core(json: AsJson = False) -> int:
    """Measure planning, page keys, scheduler steps and slot operations."""
    from ferryman_cli.bench.core import run_bench_core

    return run_bench_core(as_json=json)


@bench_app.command()
def tiers(
    model_shape: Annotated[str, typer.Option(help="Architecture with random weights.")] = (
        "granite-100m"
    ),
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    threads: Annotated[int, typer.Option(min=1, help="Threads of each worker.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="New prompts, each by every tier.")] = 3,
    prompt_len: Annotated[int, typer.Option(min=256, help="Tokens of a prompt.")] = 4096,
    json: AsJson = False,
) -> int:
    """Measure the first token of a prompt, cold and from every tier, on two nodes."""
    from ferryman_cli.bench.tiers import TierChoice, run_bench_tiers

    choice = TierChoice(model_shape, dtype, threads, rounds, prompt_len)
    return run_bench_tiers(choice, as_json=json)
