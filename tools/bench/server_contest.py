"""Whole servers in turn: Ferryman and llama-server with the same weights, one client, one table.

Each server is started, warmed up, put under the same cases, and ended before the next one starts.
The cases are those of `ferryman bench serve`: streams at once, a chat, conversations behind one
system message, and long prompts that arrive beside running streams.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx
from tools.house_plan import row

from ferryman.errors import ConfigError
from ferryman.runtime.embedded import free_ports
from ferryman_bench.endpoint.client import open_endpoint
from ferryman_bench.hardware import machine_json, machine_now
from ferryman_bench.report import figure
from ferryman_bench.serve.load_run import (
    ArrivalLoop,
    Ends,
    FullLoop,
    LoadRun,
    TraceLoop,
    ignoring_ends,
    without_ends,
)
from ferryman_bench.serve.turn_record import TurnRecord, percentiles_of, samples
from ferryman_bench.serve.workload import LoadSession, LoadShape, LoadTurn, made_sessions

READY_SECONDS = 240.0
NAME = "contest"
STREAMS_BESIDE = 4


@dataclass(frozen=True, slots=True)
class ContestServer:
    """A server by the command that starts it; `url` answers once it is ready. `ends` gives the
    fields that keep the ends of text out of an answer of so many tokens."""

    name: str
    command: tuple[str, ...]
    url: str
    ends: Ends


@dataclass(frozen=True, slots=True)
class ServerCase:
    """A load, and the figures that are taken from its records."""

    name: str
    sessions: Sequence[LoadSession]
    loop: ArrivalLoop


@dataclass(frozen=True, slots=True)
class ServerContestOptions:
    """`model` is a folder for Ferryman, `gguf` a file of the same weights for `llama_server`."""

    model: Path
    gguf: Path
    llama_server: Path
    threads: int = 2
    slots: int = 24
    slot_context: int = 4096
    ferryman_arguments: tuple[str, ...] = ()
    llama_arguments: tuple[str, ...] = ()


def contest_cases(seed: int) -> list[ServerCase]:
    """The cases, with new prompts for each seed."""

    # Sessions, turns, words of a prompt, words that are shared, tokens of an answer.
    sizes: dict[str, tuple[str, tuple[int, int, int, int, int], int]] = {
        # One answer has 127 gaps: too few for a p99.
        "1 stream": ("random", (4, 1, 200, 1, 128), 1),
        "8 streams": ("random", (8, 1, 200, 1, 96), 8),
        "24 streams": ("random", (24, 1, 120, 1, 64), 24),
        "chat": ("chat", (1, 10, 40, 300, 48), 1),
        "system": ("prefix", (8, 1, 60, 900, 16), 1),
    }
    cases = []
    for place, (name, (workload, size, concurrent)) in enumerate(sizes.items()):
        # A seed of its own: the same one would repeat the prompts of the case before.
        shape = LoadShape(*size, seed=len(sizes) * seed + place)
        cases.append(ServerCase(name, made_sessions(workload, shape), FullLoop(concurrent)))
    return [*cases, ServerCase("beside", beside_sessions(seed), TraceLoop())]


def beside_sessions(seed: int) -> list[LoadSession]:
    """Four streams that begin at once, and two prompts of 1,500 words while they run."""
    shape, random = LoadShape(), Random(seed)
    sizes = [(40, 160, 0.0)] * STREAMS_BESIDE + [(1_500, 8, 2.0), (1_500, 8, 4.0)]
    return [
        LoadSession((LoadTurn(shape.words(random, words), tokens),), arrival_seconds=at)
        for words, tokens, at in sizes
    ]


def run_server_contest(choice: ServerContestOptions, *, as_json: bool) -> int:
    """Prints the table in Markdown, or all records as JSON. Raises ConfigError if a server does
    not start."""
    results: dict[str, dict[str, list[TurnRecord]]] = {}
    with tempfile.TemporaryDirectory(prefix="ferryman-servers-") as name:
        for server in contest_servers(choice, Path(name)):
            with running_server(server, Path(name)):
                results[server.name] = asyncio.run(measured_cases(server, contest_cases(1)))
    machine = machine_now()
    if as_json:
        print(json.dumps({"machine": machine_json(machine), "servers": _objects(results)}))
        return 0
    print("\n".join(table_lines(results)))
    print(f"\n{machine}")
    return 0


def contest_servers(choice: ServerContestOptions, scratch: Path) -> list[ContestServer]:
    ours, theirs = free_ports(2)
    threads = str(choice.threads)
    ferryman = (
        *(sys.executable, "-m", "ferryman_cli", "up", "--worker", "both", "--threads", threads),
        *("--model", str(choice.model), "--served-name", NAME, "--http-port", str(ours)),
        *("--grpc-port", "0", "--state-dir", str(scratch / "state")),
        *choice.ferryman_arguments,
    )
    llama = (
        *(str(choice.llama_server), "-m", str(choice.gguf), "--alias", NAME),
        *("--host", "127.0.0.1", "--port", str(theirs), "-t", threads, "-tb", threads),
        *("--parallel", str(choice.slots), "-c", str(choice.slots * choice.slot_context)),
        *("--jinja", *choice.llama_arguments),
    )
    return [
        ContestServer("Ferryman", ferryman, f"http://127.0.0.1:{ours}", without_ends),
        ContestServer("llama-server", llama, f"http://127.0.0.1:{theirs}", ignoring_ends),
    ]


@contextmanager
def running_server(server: ContestServer, scratch: Path) -> Iterator[None]:
    """The server, for the length of a block. Raises ConfigError with the end of its log."""
    log = scratch / f"{server.name}.log"
    with log.open("w") as written:
        process = subprocess.Popen(server.command, stdout=written, stderr=subprocess.STDOUT)
        try:
            _await_ready(server, process, log)
            yield
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_ready(server: ContestServer, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            # llama-server lists its model while it still loads it; its health says when.
            if httpx.get(f"{server.url}/health").is_success and _lists_a_model(server.url):
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise ConfigError(f"{server.name} did not start: {log.read_text()[-500:]}")


def _lists_a_model(url: str) -> bool:
    answer = httpx.get(f"{url}/v1/models")
    return answer.is_success and bool(answer.json().get("data"))


async def measured_cases(
    server: ContestServer, cases: Sequence[ServerCase]
) -> dict[str, list[TurnRecord]]:
    """The records of each case, after a first one that is not kept."""
    async with open_endpoint(server.url) as (client, _):
        warm = made_sessions("random", LoadShape(2, 1, 40, 1, 8, seed=99))
        await LoadRun(client, server.ends).run(warm, FullLoop(2))
        results = {}
        for case in cases:
            results[case.name] = await LoadRun(client, server.ends).run(case.sessions, case.loop)
            # A run that is stopped has shown what it measured.
            print(f"{server.name}: {case_line(case.name, results[case.name])}", file=sys.stderr)
        return results


def case_line(name: str, records: Sequence[TurnRecord]) -> str:
    """A case in a line: tokens in a second, medians of first token and gaps, failures."""
    seconds, rate = _seconds_and_rate(records)
    times = samples(records)
    middles = ", ".join(f"{kind} {figure(median(values))} ms" for kind, values in times.items())
    failed = sum(bool(record.error) for record in records)
    return (
        f"{name}: {figure(seconds)} s, {figure(rate)} tokens a second, {middles}, {failed} failed"
    )


def _seconds_and_rate(records: Sequence[TurnRecord]) -> tuple[float, float]:
    """From the first request to the end of the last answer, and tokens in a second."""
    seconds = max(record.ended for record in records) - min(record.sent for record in records)
    return seconds, sum(record.num_tokens for record in records) / seconds


def case_rows(records: Mapping[str, Sequence[TurnRecord]]) -> dict[str, str]:
    """The cells of one server, by the name of their row."""
    rows = {}
    for name in ("1 stream", "8 streams", "24 streams"):
        times, (_, rate) = samples(records[name]), _seconds_and_rate(records[name])
        first, gaps = (percentiles_of(times[kind]) for kind in ("first token", "between tokens"))
        rows[f"{name}: tokens in a second"] = figure(rate)
        rows[f"{name}: first token p50; gap p50 / p99, ms"] = (
            f"{figure(first[50])}; {figure(gaps[50])} / {figure(gaps[99])}"
        )
    rows["first tokens of turns 2 to 10 of a chat, p50, ms"] = _later(records["chat"], by_turn=True)
    rows["first tokens of conversations 2 to 8 behind one system message, p50, ms"] = _later(
        records["system"], by_turn=False
    )
    streams = [record for record in records["beside"] if record.session < STREAMS_BESIDE]
    prompts = [record for record in records["beside"] if record.session >= STREAMS_BESIDE]
    gaps = percentiles_of([1e3 * gap for record in streams for gap in record.gaps])
    firsts = median(1e3 * record.first_seconds for record in prompts)
    rows["gaps of 4 streams while 2 prompts of 1,500 words arrive, p50 / p99, ms"] = (
        f"{figure(gaps[50])} / {figure(gaps[99])}"
    )
    rows["first tokens of these prompts, ms"] = figure(firsts)
    return rows


def _later(records: Sequence[TurnRecord], *, by_turn: bool) -> str:
    """The median first token of all but the first turn, or the first session."""
    later = [record for record in records if (record.turn if by_turn else record.session) > 0]
    return figure(median(1e3 * record.first_seconds for record in later))


def table_lines(results: Mapping[str, Mapping[str, Sequence[TurnRecord]]]) -> list[str]:
    """The table in Markdown, a column for each server."""
    cells = {name: case_rows(records) for name, records in results.items()}
    names = next(iter(cells.values()))
    return [
        row(("", *cells)),
        row("---" for _ in range(len(cells) + 1)),
        *(row((name, *(column[name] for column in cells.values()))) for name in names),
    ]


def _objects(results: Mapping[str, Mapping[str, Sequence[TurnRecord]]]) -> dict[str, Any]:
    return {
        server: {case: [asdict(record) for record in records] for case, records in cases.items()}
        for server, cases in results.items()
    }
