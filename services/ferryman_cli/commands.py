"""The flags of every command. What a command does is in the module of its name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ferryman.errors import ConfigError
from ferryman.schedule.request import SamplingParams
from ferryman_cli.bench.commands import bench_app
from ferryman_cli.choices import DEMO_NAME, Choices, Doors, EngineChoices, demo_model
from ferryman_cli.simulate.commands import simulate
from ferryman_cli.tier_choices import TierChoices, tier_size
from ferryman_cli.where import (
    STATE_DIR,
    AsJson,
    ClusterName,
    GrpcAddress,
    NatsUrl,
    RequestId,
    StateDir,
    grpc_address,
    nats_and_name,
)

ENGINE, DOORS, TIERS = EngineChoices(), Doors(), TierChoices()

Model = Annotated[
    str, typer.Option(metavar="DIR", help="A Hugging Face folder; by default the demo model.")
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float64.")]
PageSize = Annotated[int, typer.Option(min=1, help="Tokens in a page; a power of two.")]
ChunkTokens = Annotated[int, typer.Option(min=1, help="Tokens that one prefill step takes.")]
MaxRunning = Annotated[int, typer.Option(min=1, help="Requests that a worker runs at once.")]
MemoryBytes = Annotated[int, typer.Option(min=1, help="Bytes of all state pools of a worker.")]
Threads = Annotated[
    int, typer.Option(min=0, help="Threads of each worker; 0 shares the cores among them.")
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token.")]
Seed = Annotated[int, typer.Option(help="The same seed draws the same tokens.")]
Port = typer.Option(min=0, max=65535, help="Where the router listens; 0 takes a free port.")
Workers = typer.Option(min=1, max=64, help="How many workers of this role.")
Ranks = typer.Option(min=1, max=64, help="Ranks (processes) that share each worker's model.")


def add_to(app: typer.Typer) -> None:
    """Makes all commands known."""
    for command in (up, chat, generate, trace, explain, top, events, simulate):
        app.command()(command)
    app.add_typer(bench_app)


def up(
    model: Model = "",
    served_name: Annotated[str, typer.Option(help="What clients call the model.")] = "",
    prefill: Annotated[int, Workers] = 1,
    decode: Annotated[int, Workers] = 1,
    prefill_tp: Annotated[int, Ranks] = 1,
    decode_tp: Annotated[int, Ranks] = 1,
    host: Annotated[str, typer.Option(help="The address the router listens on.")] = DOORS.host,
    http_port: Annotated[int, Port] = DOORS.http_port,
    grpc_port: Annotated[int, Port] = DOORS.grpc_port,
    nats_url: Annotated[str, typer.Option(help="A broker to use instead of an own one.")] = "",
    redis_url: Annotated[str, typer.Option(help="A Redis to use instead of an own one.")] = "",
    cluster: Annotated[str, typer.Option(help="The cluster's name in NATS subjects.")] = "local",
    state_dir: StateDir = STATE_DIR,
    dtype: Dtype = ENGINE.dtype,
    page_size: PageSize = ENGINE.page_size,
    chunk_tokens: ChunkTokens = ENGINE.chunk_tokens,
    max_running: MaxRunning = ENGINE.max_running,
    memory_bytes: MemoryBytes = ENGINE.memory_bytes,
    snapshot_grid: Annotated[
        int, typer.Option(min=0, help="Tokens between snapshots kept along a prompt; 0: none.")
    ] = ENGINE.snapshot_grid,
    draft: Annotated[
        str, typer.Option(metavar="ngram|DIR", help="Draft from the text, or with a small model.")
    ] = ENGINE.draft,
    draft_tokens: Annotated[
        int, typer.Option(min=1, max=64, help="Drafts that a step verifies of each request.")
    ] = ENGINE.draft_tokens,
    nodes: Annotated[
        int, typer.Option(min=1, max=16, help="Nodes, each with its host-cache and its workers.")
    ] = TIERS.num_nodes,
    host_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Host tier, all pools and nodes: 512M, 2G, bytes.")
    ] = "",
    storage_dir: Annotated[
        str, typer.Option(metavar="DIR", help="Storage tier; by default in the state folder.")
    ] = "",
    storage_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Storage tier, all nodes; without size or DIR none.")
    ] = "",
    write_policy: Annotated[
        str, typer.Option(help="write_through, write_through_selective or write_back.")
    ] = TIERS.write_policy,
    prefetch_policy: Annotated[
        str, typer.Option(help="best_effort, wait_complete or timeout.")
    ] = TIERS.prefetch_policy,
    prefetch_threshold: Annotated[
        int, typer.Option(min=0, help="Tokens below which nothing is prefetched.")
    ] = TIERS.prefetch_threshold,
    threads: Threads = 0,
    drain_seconds: Annotated[
        float, typer.Option(min=0.1, help="How long requests under way may take at the end.")
    ] = 30.0,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    json: Annotated[
        bool, typer.Option("--json", help="Say that it is ready in one line of JSON.")
    ] = False,
) -> int:
    """Start a cluster and stay in the foreground; Ctrl-C drains and ends it.

    Endpoints and process ids are in cluster.json of the state folder, where the other commands
    look; logs are beside it.
    """
    from ferryman_cli.up import run_up

    folder = Path(model) if model else demo_model()
    engine = EngineChoices(
        dtype=dtype,
        page_size=page_size,
        chunk_tokens=chunk_tokens,
        max_running=max_running,
        memory_bytes=memory_bytes,
        threads=threads,
        snapshot_grid=snapshot_grid,
        draft=draft,
        draft_tokens=draft_tokens,
    )
    tiers = TierChoices(
        host_bytes=tier_size("--host-memory", host_memory),
        storage_dir=storage_dir,
        storage_bytes=tier_size("--storage-bytes", storage_bytes),
        write_policy=write_policy,
        prefetch_policy=prefetch_policy,
        prefetch_threshold=prefetch_threshold,
        num_nodes=nodes,
    )
    choices = Choices(
        model=folder,
        served_name=served_name or (folder.resolve().name if model else DEMO_NAME),
        engine=engine,
        doors=Doors(host, http_port, grpc_port),
        num_prefill=prefill,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        num_decode=decode,
        nats_url=nats_url,
        redis_url=redis_url,
        cluster=cluster,
        tiers=tiers,
        drain_seconds=drain_seconds,
        log_level=log_level,
    )
    return run_up(choices, state_dir, as_json=json)


def chat(
    grpc: GrpcAddress = "",
    state_dir: StateDir = STATE_DIR,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
) -> int:
    """Talk to the model, turn by turn."""
    from ferryman_cli.chat import run_chat

    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    return run_chat(grpc_address(grpc, state_dir), sampling)


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
    dtype: Dtype = ENGINE.dtype,
    page_size: PageSize = ENGINE.page_size,
    memory_bytes: MemoryBytes = ENGINE.memory_bytes,
    threads: Threads = 0,
    json: AsJson = False,
) -> int:
    """Complete prompts in this process, without any server."""
    from ferryman_cli.generate import Asked, run_generate

    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        logprobs=logprobs,
        ignore_eos=ignore_eos,
    )
    prompts = tuple(prompt) if prompt else (_piped(),)
    asked = Asked(Path(model) if model else demo_model(), prompts, sampling, is_chat=chat)
    engine = EngineChoices(dtype, page_size, memory_bytes=memory_bytes, threads=threads)
    return run_generate(asked, engine, as_json=json)


def trace(
    request_id: RequestId,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 unless the events are legal.")
    ] = False,
    nats: NatsUrl = "",
    cluster: ClusterName = "",
    state_dir: StateDir = STATE_DIR,
    json: AsJson = False,
) -> int:
    """Draw what happened to a request, from the lifecycle log."""
    from ferryman_cli.trace import run_trace

    where = nats_and_name(nats, cluster, state_dir)
    return run_trace(where, request_id, checks=check, as_json=json)


def explain(
    request_id: RequestId,
    grpc: GrpcAddress = "",
    state_dir: StateDir = STATE_DIR,
    json: AsJson = False,
) -> int:
    """Show why a request was routed as it was, with the runner-up."""
    from ferryman_cli.explain import run_explain

    return run_explain(grpc_address(grpc, state_dir), request_id, as_json=json)


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False,
    nats: NatsUrl = "",
    cluster: ClusterName = "",
    state_dir: StateDir = STATE_DIR,
    json: AsJson = False,
) -> int:
    """Show all workers, live."""
    from ferryman_cli.top import run_top

    return run_top(nats_and_name(nats, cluster, state_dir), once=once, as_json=json)


def events(
    request_id: Annotated[str, typer.Argument(metavar="[ID]", help="A request id.")] = "",
    nats: NatsUrl = "",
    cluster: ClusterName = "",
    state_dir: StateDir = STATE_DIR,
    json: AsJson = False,
) -> int:
    """Follow lifecycle events as they happen, of one request or of all."""
    from ferryman_cli.events import run_events

    return run_events(nats_and_name(nats, cluster, state_dir), request_id, as_json=json)


def _piped() -> str:
    if sys.stdin.isatty():
        raise ConfigError("give a --prompt, or pipe one in")
    text = sys.stdin.read().strip("\n")
    if not text:
        raise ConfigError("the prompt is empty")
    return text
