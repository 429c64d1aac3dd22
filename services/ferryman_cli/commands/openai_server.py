"""The commands about any server that answers as OpenAI's does, and their flags."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ferryman.errors import ConfigError
from ferryman_cli.commands.completions import words
from ferryman_cli.endpoints import AsJson

if TYPE_CHECKING:
    from ferryman_bench.endpoint.inquiry import EndpointDoor

ServerUrl = Annotated[
    str, typer.Argument(metavar="URL", help="A server such as http://127.0.0.1:8000.")
]
ServedModel = Annotated[
    str, typer.Option("--model", help="A model's name; by default the first that is listed.")
]
ServerKey = Annotated[
    str,
    typer.Option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="Its API key."),
]
Door = Annotated[
    str,
    typer.Option(
        help="chat (chat/completions) or text (completions).",
        autocompletion=words(("chat", "text")),
    ),
]


def verify(
    url: ServerUrl,
    model: ServedModel = "",
    api_key: ServerKey = "",
    door: Door = "chat",
    cold: Annotated[
        str, typer.Option(help="How questions are cold: salt, no-cache, flush, or auto.")
    ] = "auto",
    requests: Annotated[int, typer.Option(min=100, help="At most so many.")] = 1000,
    max_tokens: Annotated[int, typer.Option(min=4, help="Tokens of an answer.")] = 16,
    fillers: Annotated[
        int, typer.Option(min=1, help="Long prompts that should fill the cache.")
    ] = 12,
    rate: Annotated[
        float, typer.Option(min=1e-9, max=0.5, help="Share of sound servers that are accused.")
    ] = 0.001,
    rounding: Annotated[
        float, typer.Option(min=0.0, help="Nats that count as rounding, at least.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="The same seed asks the same questions.")] = 0,
    json: AsJson = False,
) -> int:
    """Ask a server the same cold and with reused state, and say which reuse changes answers.

    Exit status 1 if one does. Questions go one after the other, but where a crowd is tried.
    """
    # Here, because the help of other commands needs no HTTP client.
    from ferryman_bench.verify.cold_source import ColdKind
    from ferryman_bench.verify.examination import ExaminationPlan
    from ferryman_bench.verify.run import VerifyOptions, run_verify

    colds = {str(kind): kind for kind in ColdKind}
    if cold not in colds:
        raise ConfigError(f"--cold {cold}: give {', '.join(colds)}")
    plan = ExaminationPlan(requests, rate, rounding)
    choice = VerifyOptions(
        url, model, api_key, _door(door), colds[cold], plan, max_tokens, fillers, seed
    )
    return run_verify(choice, as_json=json)


def serve(
    url: ServerUrl,
    model: ServedModel = "",
    api_key: ServerKey = "",
    door: Door = "chat",
    workload: Annotated[
        str, typer.Option(help="random, prefix, chat, agents, tools or recall.")
    ] = "random",
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A Mooncake trace or a lifecycle log.")
    ] = None,
    speed: Annotated[float, typer.Option(min=1e-3, help="Of a trace, as a multiple.")] = 1.0,
    sessions: Annotated[int, typer.Option(min=1, help="Sessions, or requests of a trace.")] = 32,
    turns: Annotated[int, typer.Option(min=1, help="Of a session that has several.")] = 4,
    prompt_words: Annotated[int, typer.Option(min=1, help="Words of a message.")] = 200,
    shared_words: Annotated[int, typer.Option(min=1, help="Of a system message, or facts.")] = 900,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    concurrent: Annotated[int, typer.Option(min=1, help="Sessions at once (closed loop).")] = 8,
    rate: Annotated[
        float, typer.Option(min=0, help="Sessions a second (open loop), in place of that.")
    ] = 0.0,
    first_limit: Annotated[float, typer.Option(min=1, help="Milliseconds, if good.")] = 1000.0,
    gap_limit: Annotated[float, typer.Option(min=1, help="Mean between tokens, if good.")] = 100.0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed sends the same.")] = 0,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with plots there.")
    ] = None,
    json: AsJson = False,
) -> int:
    """Load any server that answers as OpenAI's does, and measure it as its users do."""
    from ferryman_bench.serve.load_run import ArrivalLoop, FullLoop, OpenLoop, TraceLoop
    from ferryman_bench.serve.run import ServeOptions, run_bench_serve
    from ferryman_bench.serve.trace_workload import trace_sessions
    from ferryman_bench.serve.turn_record import LatencyLimits
    from ferryman_bench.serve.workload import LoadShape, made_sessions

    loop: ArrivalLoop = OpenLoop(rate) if rate else FullLoop(concurrent)
    if trace is not None:
        listed = trace_sessions(trace, speed=speed, most=sessions)
        name, loop = trace.name, TraceLoop()
    else:
        sizes = sessions, turns, prompt_words, shared_words, answer_tokens
        listed, name = made_sessions(workload, LoadShape(*sizes, seed)), workload
    limits = LatencyLimits(first_limit / 1e3, gap_limit / 1e3)
    choice = ServeOptions(url, name, listed, loop, limits, model, api_key, _door(door), seed)
    return run_bench_serve(choice, as_json=json, html=html)


def _door(name: str) -> EndpointDoor:
    from ferryman_bench.endpoint.inquiry import EndpointDoor

    doors = {kind.name.lower(): kind for kind in EndpointDoor}
    if name not in doors:
        raise ConfigError(f"--door {name}: give {' or '.join(doors)}")
    return doors[name]
