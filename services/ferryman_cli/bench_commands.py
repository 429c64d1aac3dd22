"""The flags of `ferryman bench` and of its `core`, `loading` and `tiers`."""

from __future__ import annotations

from typing import Annotated

import typer

from ferryman_cli.endpoints import AsJson

bench_app = typer.Typer(
    name="bench",
    help="Measure this machine: the model against transformers, the core, loading, or the tiers.",
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
    from ferryman_bench.model import BenchOptions, run_bench

    return run_bench(BenchOptions(model_shape, dtype, threads, repeats), as_json=json)


@bench_app.command()
def core(json: AsJson = False) -> int:
    """Measure planning, page keys, scheduler steps and slot operations."""
    from ferryman_bench.core import run_bench_core

    return run_bench_core(as_json=json)


@bench_app.command()
def loading(
    size: Annotated[int, typer.Option(min=1, help="Megabytes of the checkpoint.")] = 2000,
    tensors: Annotated[int, typer.Option(min=40, help="Tensors in it.")] = 20_000,
    threads: Annotated[int, typer.Option(min=1, help="Threads that load, and that read.")] = 2,
    repeats: Annotated[int, typer.Option(min=2, help="Rounds of each.")] = 3,
    cold: Annotated[bool, typer.Option("--cold", help="Read from the disk each time.")] = False,
    json: AsJson = False,
) -> int:
    """Measure how fast weights are loaded, as a share of the read speed of their file."""
    from ferryman_bench.weight_load import LoadBenchOptions, run_bench_loading

    choice = LoadBenchOptions(size * 1_000_000, tensors, threads, repeats, is_cold=cold)
    return run_bench_loading(choice, as_json=json)


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
    from ferryman_bench.tiers import TierBenchOptions, run_bench_tiers

    choice = TierBenchOptions(model_shape, dtype, threads, rounds, prompt_len)
    return run_bench_tiers(choice, as_json=json)
