"""The flags of `ferryman bench` and of its commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ferryman.errors import ConfigError
from ferryman_cli.endpoints import AsJson

ModelShape = Annotated[str, typer.Option(help="Architecture with random weights.")]

bench_app = typer.Typer(
    name="bench",
    help="Measure this machine: the model against its peers, the core, loading, or the tiers.",
    rich_markup_mode=None,
)


@bench_app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    model_shape: ModelShape = "granite-100m",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or int8.")] = "bfloat16",
    threads: Annotated[int, typer.Option(min=1, help="Threads of each contender.")] = 2,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of all contenders in a cell.")] = 7,
    batch: Annotated[str, typer.Option(help="Requests that decode together.")] = "1,8,32",
    context_len: Annotated[
        str, typer.Option("--context", help="Tokens of each before it decodes.")
    ] = "128",
    prefill: Annotated[str, typer.Option(help="Lengths of cold prompts.")] = "512,2048",
    peers: Annotated[
        str, typer.Option(help="transformers, llama.cpp; all that are installed by default.")
    ] = "",
    plot: Annotated[Path | None, typer.Option(help="Write the ratios as SVG to this file.")] = None,
    json: AsJson = False,
) -> int:
    """Measure decode and prefill on random weights, against transformers and llama.cpp.

    Contenders have a process each and run in turn; ratios are medians over the rounds.
    """
    if context.invoked_subcommand is not None:
        return 0
    from ferryman_bench.model import BenchOptions, run_bench

    choice = BenchOptions(
        model_shape,
        dtype,
        threads,
        rounds,
        batches=_numbers(batch, "--batch"),
        contexts=_numbers(context_len, "--context"),
        prefills=_numbers(prefill, "--prefill"),
        peers=tuple(filter(None, peers.split(","))),
    )
    return run_bench(choice, as_json=json, plot=plot)


def _numbers(text: str, flag: str) -> tuple[int, ...]:
    """Whole numbers between commas; none for an empty text. Raises ConfigError for others."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isascii() and word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"{flag} {text}: give whole numbers above 0 with commas between them")
    return tuple(map(int, words))


@bench_app.command()
def compare(
    old: Annotated[Path, typer.Argument(help="The JSON of an earlier run.")],
    new: Annotated[Path, typer.Argument(help="The JSON of a later run.")],
    json: AsJson = False,
) -> int:
    """Compare two runs of one bench, row by row; refused across processors."""
    from ferryman_bench.comparison import run_bench_compare

    return run_bench_compare(old, new, as_json=json)


@bench_app.command()
def handoff(
    model_shape: ModelShape = "granite-100m",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    threads: Annotated[int, typer.Option(min=1, help="Threads of each worker.")] = 2,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 2048,
    json: AsJson = False,
) -> int:
    """Measure a hand-off from Reserve to Commit, beside the prefill that it includes."""
    from ferryman_bench.handoff import HandOffBenchOptions, run_bench_handoff

    choice = HandOffBenchOptions(model_shape, dtype, threads, prompt_len)
    return run_bench_handoff(choice, as_json=json)


@bench_app.command()
def requests(
    model_shape: ModelShape = "granite-100m",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or int8.")] = "bfloat16",
    threads: Annotated[int, typer.Option(min=1, help="Threads of each engine and worker.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of new prompts.")] = 3,
    concurrent: Annotated[str, typer.Option(help="Requests that are sent at once.")] = "1,8",
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 512,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 64,
    json: AsJson = False,
) -> int:
    """Measure whole requests: offline, through a cluster of 1+1, and by llama.cpp's batches."""
    from ferryman_bench.request_load import RequestBenchOptions, run_bench_requests

    choice = RequestBenchOptions(
        model_shape,
        dtype,
        threads,
        rounds,
        _numbers(concurrent, "--concurrent"),
        prompt_len,
        max_tokens,
    )
    return run_bench_requests(choice, as_json=json)


@bench_app.command()
def colocated(
    model_shape: ModelShape = "granite-100m",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or int8.")] = "bfloat16",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each cluster.")] = 3,
    streams: Annotated[int, typer.Option(min=1, max=16, help="Requests that decode.")] = 4,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts that arrive in a round.")] = 2,
    prompt_len: Annotated[int, typer.Option(min=256, help="Tokens of each.")] = 8192,
    chunk_tokens: Annotated[str, typer.Option(help="Longest chunks to try.")] = "512,128",
    gap_limit: Annotated[float, typer.Option(min=1, help="Milliseconds of a good gap.")] = 100.0,
    json: AsJson = False,
) -> int:
    """Measure running streams while prompts arrive: two roles against workers that do both."""
    from ferryman_bench.colocation import ColocationOptions, run_bench_colocation

    choice = ColocationOptions(
        model_shape,
        dtype,
        rounds,
        streams,
        prompts,
        prompt_len,
        chunk_tokens=_numbers(chunk_tokens, "--chunk-tokens"),
        gap_limit_ms=gap_limit,
    )
    return run_bench_colocation(choice, as_json=json)


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
    model_shape: ModelShape = "granite-100m",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    threads: Annotated[int, typer.Option(min=1, help="Threads of each worker.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="New prompts, each by every tier.")] = 3,
    prompt_len: Annotated[int, typer.Option(min=256, help="Tokens of a prompt.")] = 4096,
    nixl_unlocked: Annotated[
        bool,
        typer.Option("--nixl-unlocked", help="Also by NIXL, which opens ports without a lock."),
    ] = False,
    json: AsJson = False,
) -> int:
    """Measure the first token of a prompt, cold and from every tier, on two nodes."""
    from ferryman_bench.tiers import TierBenchOptions, run_bench_tiers

    choice = TierBenchOptions(model_shape, dtype, threads, rounds, prompt_len, nixl_unlocked)
    return run_bench_tiers(choice, as_json=json)
