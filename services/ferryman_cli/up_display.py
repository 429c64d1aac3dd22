"""The output of `ferryman up`: how far workers are on their start, on stderr, as a bar, lines or
events; then the endpoints of the cluster and lines to try, or JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from ferryman.settings.cluster import UpOptions
from ferryman.wire.nats.subjects import Subjects
from ferryman_launcher.checks.check_apart import CheckedCluster
from ferryman_launcher.host_plan import HostPlan, plan_line
from ferryman_launcher.readiness import CompileReport, StartReport
from ferryman_launcher.state_folder import (
    DEFAULT,
    METRICS_TOKEN,
    NATS_URL,
    RunningCluster,
    StateFolder,
)

QUESTION = "The red kite is in Oslo. The blue kite is in Lima.\nWhere is the red kite?"
STEPS = 10
"""The number of lines for one stage of one worker, at most."""
COMPILES = "compiles loops for this processor; later starts find them"

CTRL_C_ENDS = "Ctrl-C drains and ends everything."

Announce = Callable[[RunningCluster, Sequence[HostPlan]], None]
Release = Callable[[], None]


def banner(
    cluster: RunningCluster,
    state_dir: Path,
    program: str,
    plans: Iterable[HostPlan] = (),
    workers: Iterable[str] = (),
    *,
    page: str = "",
    is_detached: bool = False,
) -> str:
    """Endpoints, and lines to try; `program` is the path of this command, `workers` are lines, and
    `page` is that of `page_line`.

    The pasted lines use a new id each time, because an id names one request.
    """
    body = {"model": cluster.model, "messages": [{"role": "user", "content": QUESTION}]}
    command = os.path.relpath(program) if "/" in program else program
    tiers = "".join(f"  memory {worker}\n" for worker in workers)
    tiers += "".join(f"  tiers  {plan_line(plan)}\n" for plan in plans)
    # Tools of others do not look for the authority in the state folder.
    curl = f"curl --cacert {os.path.relpath(cluster.ca)}" if cluster.ca else "curl"
    nats = f"nats --tlsca {os.path.relpath(cluster.ca)}" if cluster.ca else "nats"
    http = "\n         ".join(f"{url}/v1" for url in cluster.http_urls)
    where = "" if state_dir == DEFAULT.absolute() else f" --state-dir {state_dir}"
    ending = f"`{command} down{where}` drains and ends everything." if is_detached else CTRL_C_ENDS
    return f"""Ferryman is up and serves {cluster.model}.

  HTTP   {http}
{page}  gRPC   {cluster.grpc}
  NATS   {cluster.nats}
  Redis  {cluster.redis}
  logs   {state_dir / "logs"}
{tiers}
Try in another terminal:

  ID=hello-$(date +%s)
  {curl} {cluster.http_urls[0]}/v1/chat/completions -H "x-request-id: $ID" \\
    -H 'content-type: application/json' -d '{json.dumps(body)}'
  {command} trace $ID{where}
  {command} chat{where}
  {nats} -s "$(cat {os.path.relpath(state_dir / NATS_URL)})" sub '{Subjects(cluster.name).all_life}'

{ending}"""


def page_url(cluster: RunningCluster, choices: UpOptions) -> str:
    """The address of the first router's web page; empty if it has none."""
    return f"{cluster.http_urls[0]}/" if choices.doors.web_page else ""


def page_line(cluster: RunningCluster, choices: UpOptions, state_dir: Path) -> str:
    """The banner's line for the web page, with its end of line; empty if there is none. A locked
    cluster shows its fleet to those who paste a token."""
    url = page_url(cluster, choices)
    token = "" if choices.insecure else f" (the fleet: key in {state_dir / METRICS_TOKEN})"
    return f"  page   {url}{token}\n" if url else ""


def json_announcer(checked: CheckedCluster, choices: UpOptions) -> Announce:
    """Prints one line of JSON, for programs."""

    def announce(cluster: RunningCluster, plans: Sequence[HostPlan]) -> None:
        line: Mapping[str, object] = {
            "event": "ready",
            "http": cluster.http,
            "page": page_url(cluster, choices),
            "grpc": cluster.grpc,
            "nats": cluster.nats,
            "redis": cluster.redis,
            "pids": dict(cluster.pids),
            "memory": checked.objects,
            "tiers": [asdict(plan) for plan in plans],
        }
        print(json.dumps(line), flush=True)

    return announce


def text_announcer(
    folder: StateFolder, checked: CheckedCluster, choices: UpOptions, *, is_detached: bool = False
) -> Announce:
    """Prints the banner, for people."""

    def announce(cluster: RunningCluster, plans: Sequence[HostPlan]) -> None:
        path, program, lines = folder.path, sys.argv[0], checked.lines
        page = page_line(cluster, choices, path)
        text = banner(cluster, path, program, plans, lines, page=page, is_detached=is_detached)
        print(text, flush=True)

    return announce


def followed_by(announce: Announce, release: Release) -> Announce:
    """Announces, and then lets go of the caller's terminal."""

    def announce_and_release(cluster: RunningCluster, plans: Sequence[HostPlan]) -> None:
        announce(cluster, plans)
        release()

    return announce_and_release


class LoadDisplay(Protocol):
    """Shows the reports of workers by name, until it is closed."""

    def show(self, name: str, report: StartReport) -> None: ...

    def close(self) -> None: ...


class LoadBars:
    """One bar for each worker on a terminal. They vanish when all are ready."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[size]}"))
        self._progress = Progress(*columns, console=console, transient=True)
        self._bars: dict[str, TaskID] = {}
        self._compiling: set[str] = set()
        self._is_closed = False

    def show(self, name: str, report: StartReport) -> None:
        if self._is_closed:  # a worker that is started again has a line of its own
            return
        self._progress.start()
        if isinstance(report, CompileReport):
            self._show_compiling(name)
            return
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(name, size="")
        self._progress.update(
            self._bars[name],
            description=f"{name}: {report.model} ({report.stage})",
            completed=report.done_bytes,
            total=report.total_bytes,
            size=f"{report.done_bytes / 1e6:,.0f} of {report.total_bytes / 1e6:,.0f} MB",
        )

    def _show_compiling(self, name: str) -> None:
        """A bar without an end in place of the load's, whose total cannot be taken back."""
        if name in self._compiling:
            return
        self._compiling.add(name)
        if name in self._bars:
            self._progress.remove_task(self._bars.pop(name))
        self._progress.add_task(f"{name}: {COMPILES}", total=None, size="")

    def close(self) -> None:
        self._is_closed = True
        self._progress.stop()


class LoadLines:
    """A line at each tenth of a stage, for a pipe or a log."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._shown: dict[tuple[str, str, str], int] = {}
        self._compiling: set[str] = set()

    def show(self, name: str, report: StartReport) -> None:
        if isinstance(report, CompileReport):
            if name not in self._compiling:
                self._say(f"{name} {COMPILES}")
            self._compiling.add(name)
            return
        done, total = report.done_bytes, report.total_bytes
        step = STEPS * done // total if total else STEPS
        stage = name, report.model, report.stage
        before = self._shown.get(stage, 0)
        self._shown[stage] = step  # a worker that is started again begins at 0
        if step > before:
            self._say(
                f"{name} loads {report.model} ({report.stage}): "
                f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
            )

    def close(self) -> None:
        """Restarted workers are shown too."""


class LoadEvents:
    """A line of JSON for each report, for a program."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def show(self, name: str, report: StartReport) -> None:
        kind = "compiling" if isinstance(report, CompileReport) else "loading"
        event = {"event": kind, "process": name, **asdict(report)}
        print_line(json.dumps(event), self._out)

    def close(self) -> None:
        """Restarted workers are shown too."""


def print_line(line: str, out: TextIO) -> None:
    """Prints a line, or drops it: a cluster outlives a full disk below its output, and a reader of
    its output that has ended."""
    with suppress(OSError):
        print(line, file=out, flush=True)


def load_display(out: TextIO, say: Callable[[str], None], *, as_json: bool) -> LoadDisplay:
    """The display for `out`, which is stderr; `say` writes a line there."""
    if as_json:
        return LoadEvents(out)
    return LoadBars(Console(file=out)) if out.isatty() else LoadLines(say)
