"""The commands of `python -m tools.bench`, and their flags."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ferryman_cli.app import run_app
from ferryman_cli.commands.bench import ModelShape, requests_command, whole_numbers
from ferryman_cli.endpoints import AsJson

if TYPE_CHECKING:
    from ferryman_bench.request_load import RequestBenchOptions

app = typer.Typer(
    help="Measure Ferryman against its peers, and the parts that `ferryman bench` does not show.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command()
def model(
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
    from tools.bench.contest import BenchOptions, run_bench

    choice = BenchOptions(
        model_shape,
        dtype,
        threads,
        rounds,
        batches=whole_numbers(batch, "--batch"),
        contexts=whole_numbers(context_len, "--context"),
        prefills=whole_numbers(prefill, "--prefill"),
        peers=tuple(filter(None, peers.split(","))),
    )
    return run_bench(choice, as_json=json, plot=plot)


GgufFile = Annotated[Path, typer.Argument(help="A GGUF file.")]


@app.command()
def file(
    path: GgufFile,
    dtype: Annotated[str, typer.Option(help="That of activations here.")] = "bfloat16",
    threads: Annotated[int, typer.Option(min=1, help="Threads of each contender.")] = 2,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of both contenders in a cell.")] = 7,
    batch: Annotated[str, typer.Option(help="Requests that decode together.")] = "1,8",
    context_len: Annotated[
        str, typer.Option("--context", help="Tokens of each before it decodes.")
    ] = "128",
    prefill: Annotated[str, typer.Option(help="Lengths of cold prompts.")] = "512",
) -> int:
    """Measure decode and prefill of a GGUF file, against llama.cpp on the same file, in turn."""
    from rich.console import Console
    from tools.bench.contest import BenchOptions, compare_file
    from tools.bench.contest_result import show_comparison

    choice = BenchOptions(
        str(path),
        dtype,
        threads,
        rounds,
        batches=whole_numbers(batch, "--batch"),
        contexts=whole_numbers(context_len, "--context"),
        prefills=whole_numbers(prefill, "--prefill"),
    )
    show_comparison(compare_file(path, choice), (), Console())
    return 0


@app.command()
def answers(
    path: GgufFile,
    dtype: Annotated[str, typer.Option(help="That of activations here.")] = "float32",
    chats: Annotated[int, typer.Option(min=1, max=20, help="Questions to ask.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 48,
) -> int:
    """Compare greedy answers of a GGUF file with those of llama.cpp on the same file: the first
    token that differs, and how near the two are."""
    from tools.bench.answers import compared_answers

    print("\n".join(compared_answers(path, dtype, chats, tokens)))
    return 0


def _run_requests(choice: RequestBenchOptions, as_json: bool) -> int:
    from tools.bench.llama_requests import run_bench_with_llama

    return run_bench_with_llama(choice, as_json=as_json)


app.command()(
    requests_command(
        _run_requests,
        "Measure whole requests as `ferryman bench requests`, and by llama.cpp's batches.",
    )
)


@app.command()
def core(json: AsJson = False) -> int:
    """Measure planning, page keys, scheduler steps and slot operations."""
    from tools.bench.core import run_bench_core

    return run_bench_core(as_json=json)


@app.command()
def loading(
    size: Annotated[int, typer.Option(min=1, help="Megabytes of the checkpoint.")] = 2000,
    tensors: Annotated[int, typer.Option(min=40, help="Tensors in it.")] = 20_000,
    threads: Annotated[int, typer.Option(min=1, help="Threads that load, and that read.")] = 2,
    repeats: Annotated[int, typer.Option(min=2, help="Rounds of each.")] = 3,
    cold: Annotated[bool, typer.Option("--cold", help="Read from the disk each time.")] = False,
    json: AsJson = False,
) -> int:
    """Measure how fast weights are loaded, as a share of the read speed of their file."""
    from tools.bench.weight_load import LoadBenchOptions, run_bench_loading

    choice = LoadBenchOptions(size * 1_000_000, tensors, threads, repeats, is_cold=cold)
    return run_bench_loading(choice, as_json=json)


@app.command()
def servers(
    model: Annotated[Path, typer.Option(metavar="DIR", help="A model's folder, for Ferryman.")],
    gguf: Annotated[Path, typer.Option(metavar="FILE", help="The same weights, for llama.cpp.")],
    llama_server: Annotated[Path, typer.Option(metavar="FILE", help="llama.cpp's server.")],
    threads: Annotated[int, typer.Option(min=1, help="Threads of each server.")] = 2,
    slots: Annotated[int, typer.Option(min=1, help="Requests at once in llama-server.")] = 24,
    up_arguments: Annotated[str, typer.Option(help="Further ones for `ferryman up`.")] = "",
    llama_arguments: Annotated[str, typer.Option(help="Further ones for llama-server.")] = "",
    json: AsJson = False,
) -> int:
    """Measure Ferryman and llama-server in turn, as their users see them, over HTTP.

    Prints the table of docs/measured.md.
    """
    from tools.bench.server_contest import ServerContestOptions, run_server_contest

    further = tuple(up_arguments.split()), tuple(llama_arguments.split())
    options = ServerContestOptions(model, gguf, llama_server, threads, slots)
    choice = replace(options, ferryman_arguments=further[0], llama_arguments=further[1])
    return run_server_contest(choice, as_json=json)


def run(arguments: list[str]) -> int:
    """The exit status, as that of `ferryman`."""
    return run_app(app, "python -m tools.bench", arguments)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
