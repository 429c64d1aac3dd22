"""Commands about requests: send them, and see what became of them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ferryman.errors import ConfigError
from ferryman.schedule.request import SamplingParams
from ferryman.settings.engine import EngineOptions
from ferryman.settings.sources import read_settings
from ferryman_cli.endpoints import (
    STATE_DIR,
    ApiKey,
    AsJson,
    CaFile,
    ClusterName,
    GrpcAddress,
    NatsUrl,
    RequestId,
    StateDir,
    Verbose,
    broker_place,
    door_place,
)
from ferryman_launcher.checks.model_places import locate
from ferryman_launcher.options import up_sources

Model = Annotated[
    str,
    typer.Option(metavar="DIR|ID", help="A folder or an id on the hub; by default the demo model."),
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float64.")]
Quantize = Annotated[
    str, typer.Option(help="int8: weights of linear layers become int8 at load; or none.")
]
PageSize = Annotated[int, typer.Option(min=1, help="Tokens in a page; a power of two.")]
MemoryBytes = Annotated[
    str, typer.Option(metavar="SIZE", help="Bytes of all state pools of a worker.")
]
Threads = Annotated[
    int, typer.Option(min=0, help="Threads of each worker; 0 shares the cores among them.")
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token.")]
Seed = Annotated[int, typer.Option(help="The same seed draws the same tokens.")]


def chat(
    grpc: GrpcAddress = "",
    ca: CaFile = "",
    state_dir: StateDir = STATE_DIR,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
) -> int:
    """Talk to the model, turn by turn."""
    from ferryman_cli.chat import run_chat

    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    return run_chat(door_place(grpc, ca, state_dir), sampling)


def generate(
    prompt: Annotated[
        list[str] | None, typer.Option(help="May be given several times; else stdin is read.")
    ] = None,
    model: Model = "",
    chat: Annotated[bool, typer.Option("--chat", help="Prompts are turns of a chat.")] = False,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    logprobs: Annotated[int, typer.Option(min=0, help="Alternatives shown per token.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to max-tokens.")] = False,
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    page_size: PageSize = 16,
    memory_bytes: MemoryBytes = "512M",
    threads: Threads = 0,
    json: AsJson = False,
) -> int:
    """Complete prompts in this process, without any server."""
    from ferryman_cli.generate import BatchRequest, run_generate

    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        logprobs=logprobs,
        ignore_eos=ignore_eos,
    )
    prompts = tuple(prompt) if prompt else (_piped(),)
    chosen = {"dtype": dtype, "quantize": quantize, "page_size": page_size}
    flags = {"model": model or None, "threads": threads, "memory_bytes": memory_bytes, **chosen}
    sources, places = locate(up_sources(flags, {}))
    engine = read_settings(EngineOptions, "", sources)
    places.fetch()
    asked = BatchRequest(engine.model, prompts, sampling, is_chat=chat)
    return run_generate(asked, engine, as_json=json)


def trace(
    request_id: RequestId,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 unless the events are legal.")
    ] = False,
    broker: Annotated[
        bool, typer.Option("--broker", help="Also the way of its events through NATS.")
    ] = False,
    verbose: Verbose = False,
    nats: NatsUrl = "",
    cluster: ClusterName = "",
    ca: CaFile = "",
    state_dir: StateDir = STATE_DIR,
    json: AsJson = False,
) -> int:
    """Show where a request's time went, and what it reused; with -v every event of its log."""
    from ferryman_cli.trace import run_trace

    where = broker_place(nats, cluster, ca, state_dir)
    return run_trace(
        where, request_id, checks=check, has_hops=broker, is_verbose=verbose, as_json=json
    )


def explain(
    request_id: RequestId,
    verbose: Verbose = False,
    grpc: GrpcAddress = "",
    api_key: ApiKey = "",
    ca: CaFile = "",
    state_dir: StateDir = STATE_DIR,
    json: AsJson = False,
) -> int:
    """Say why a request went to its workers, and what it found there; with -v all numbers."""
    from ferryman_cli.explain import run_explain

    door = door_place(grpc, ca, state_dir)
    return run_explain(door, request_id, api_key=api_key, is_verbose=verbose, as_json=json)


def events(
    request_id: Annotated[str, typer.Argument(metavar="[ID]", help="A request id.")] = "",
    verbose: Verbose = False,
    nats: NatsUrl = "",
    cluster: ClusterName = "",
    ca: CaFile = "",
    state_dir: StateDir = STATE_DIR,
    json: AsJson = False,
) -> int:
    """Follow lifecycle events as they happen, of one request or of all."""
    from ferryman_cli.trace import run_events

    place = broker_place(nats, cluster, ca, state_dir)
    return run_events(place, request_id, is_verbose=verbose, as_json=json)


def _piped() -> str:
    if sys.stdin.isatty():
        raise ConfigError("give a --prompt, or pipe one in")
    text = sys.stdin.read().strip("\n")
    if not text:
        raise ConfigError("the prompt is empty")
    return text
