"""The commands of `ferryman bench`, and their flags."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ferryman.errors import ConfigError
from ferryman.settings.declaration import size_of
from ferryman_cli.endpoints import AsJson

if TYPE_CHECKING:
    from ferryman_bench.request_load import RequestBenchOptions

ModelShape = Annotated[str, typer.Option(help="Architecture with random weights.")]

bench_app = typer.Typer(name="bench", rich_markup_mode=None)


@bench_app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    """Measure this machine: requests, a hand-off, prompts beside streams, or the tiers."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def whole_numbers(text: str, flag: str) -> tuple[int, ...]:
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
    from ferryman_bench.report import run_bench_compare

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


def requests_command(
    run: Callable[[RequestBenchOptions, bool], int], meaning: str
) -> Callable[..., int]:
    """A command `requests` whose help is `meaning`: `run` gets its choices, and whether it prints
    JSON."""

    def requests(
        model_shape: ModelShape = "granite-100m",
        model: Annotated[
            str, typer.Option(help="Folder of a model, in place of a shape.", metavar="PATH")
        ] = "",
        dtype: Annotated[str, typer.Option(help="float32, bfloat16 or int8.")] = "bfloat16",
        device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
        threads: Annotated[int, typer.Option(min=1, help="Threads of each engine and worker.")] = 2,
        rounds: Annotated[int, typer.Option(min=1, help="Rounds of new prompts.")] = 3,
        concurrent: Annotated[str, typer.Option(help="Requests that are sent at once.")] = "1,8",
        prompt_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 512,
        max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 64,
        worker: Annotated[
            str, typer.Option(help="Clusters: apart (1+1), both, or apart,both.")
        ] = "apart",
        memory_bytes: Annotated[
            str, typer.Option(help="Memory for state, of each engine and worker.", metavar="SIZE")
        ] = "2G",
        max_running: Annotated[
            int, typer.Option(min=1, help="Requests that run at once in each.")
        ] = 16,
        json: AsJson = False,
    ) -> int:
        # Here, because the help of other commands needs no numpy and no torch.
        from ferryman_bench.request_load import RequestBenchOptions, cluster_names
        from ferryman_bench.subject import ModelFolder, RandomModel

        choice = RequestBenchOptions(
            ModelFolder(Path(model)) if model else RandomModel(model_shape),
            dtype,
            threads,
            rounds,
            whole_numbers(concurrent, "--concurrent"),
            prompt_len,
            max_tokens,
            cluster_names(worker),
            device,
            size_of("--memory-bytes", memory_bytes),
            max_running,
        )
        return run(choice, json)

    requests.__doc__ = meaning
    return requests


def _run_requests(choice: RequestBenchOptions, as_json: bool) -> int:
    from ferryman_bench.request_load import run_bench_requests

    return run_bench_requests(choice, as_json=as_json)


bench_app.command()(
    requests_command(
        _run_requests, "Measure whole requests, by the offline engine and through clusters."
    )
)


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
        chunk_tokens=whole_numbers(chunk_tokens, "--chunk-tokens"),
        gap_limit_ms=gap_limit,
    )
    return run_bench_colocation(choice, as_json=json)


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
