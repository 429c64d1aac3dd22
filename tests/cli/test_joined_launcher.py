"""Checks, calls and arguments where the launcher's and the command line's parts meet: each was once
left out by a draw of planted defects, and no test noticed."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console
from tests.cli.test_child import EndedProcess, job, started, thing_log
from tests.cli.test_fork_server import toys
from tests.waiting import until

from ferryman.client import SamplingParams
from ferryman.errors import ConfigError, DeadlineExceeded, Unavailable
from ferryman.runtime.life import EXIT_MISCONFIGURED
from ferryman.schedule.request import FinishReason
from ferryman.settings.names import variable
from ferryman.wire.public import NOT_PARTED, GenerateFinished, GenerateStarted
from ferryman.wire.values import Usage
from ferryman_cli import chat, roll
from ferryman_cli.app import run
from ferryman_cli.commands.requests import _piped
from ferryman_cli.commands.simulate import _with_model
from ferryman_cli.up import _Up
from ferryman_launcher.checks.option_checks import _check_answers
from ferryman_launcher.child import LINE_BYTES, Child, ignored
from ferryman_launcher.fork_server import can_fork
from ferryman_launcher.options import demo_model
from ferryman_simulator.options import SimulateOptions


def states_of_children(pid: int) -> list[str]:
    """The state of each child of a process; Z for one that nobody waited for."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    stats = [Path(f"/proc/{child}/stat").read_text() for child in children]
    return [stat.rpartition(")")[2].split()[0] for stat in stats]


async def test_starting_services_leaves_no_descriptor_and_no_process(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with toys(tmp_path) as toy:
        children = [(await toy.start())[0] for _ in range(3)]
        assert states_of_children(toy.forks.pid) == []
        for child in children:
            assert await child.stop(120)
        toy.forks.refuse("the test is over")
        await asyncio.sleep(0)
        assert len(os.listdir("/proc/self/fd")) == before
        assert can_fork()
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_system_without_handles_of_processes_forks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def open_none(pid: int) -> int:
        raise OSError(38, "no such call")

    monkeypatch.setattr(os, "pidfd_open", open_none)
    assert not can_fork()


async def test_a_forked_service_whose_transport_is_closed_is_killed(tmp_path: Path) -> None:
    with toys(tmp_path) as toy:
        child, _ = await toy.start()
        assert child._transport is not None
        child._transport.close()
        await asyncio.wait_for(child._exited.wait(), 120)
        assert child._process.get_returncode() == -9


async def test_a_deaf_service_has_ended_when_it_was_stopped(tmp_path: Path) -> None:
    program = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True);"
    )
    child = await started(f"{program} signal.pause()", tmp_path)
    await until(lambda: "deaf" in (tmp_path / "thing.log").read_text())
    assert not await child.stop(0.05)
    assert not child.is_running
    assert child._process.get_returncode() is not None


async def test_the_last_words_may_come_after_the_exit(tmp_path: Path) -> None:
    child = Child(job(""), thing_log(tmp_path), ignored)
    child.connection_made(EndedProcess())
    waiting = asyncio.create_task(child.ready(30))
    child.process_exited()
    await asyncio.sleep(0)
    child.pipe_data_received(1, b"error: less\n")
    child.connection_lost(None)
    with pytest.raises(ConfigError, match=r"^thing: less$"):
        await waiting


@pytest.mark.parametrize(("more", "is_heard"), [(0, True), (1, False)])
async def test_a_line_is_heard_whole_up_to_its_bound(
    tmp_path: Path, more: int, is_heard: bool
) -> None:
    child = Child(job(""), thing_log(tmp_path), ignored)
    child.connection_made(EndedProcess())
    head = b'{"event": "ready", "address": "'
    child.pipe_data_received(1, head + b"x" * (LINE_BYTES + more - len(head)))
    child.pipe_data_received(1, b'"}\n')
    child.connection_lost(None)
    assert (child._ready_event is not None) == is_heard


def test_a_prompt_is_not_awaited_from_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class TypingTerminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for source, words in (
        (TypingTerminal("hi"), "give a --prompt"),
        (io.StringIO("\n"), "is empty"),
    ):
        monkeypatch.setattr(sys, "stdin", source)
        with pytest.raises(ConfigError, match=words):
            _piped()
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert _piped() == "hi"


def test_a_server_of_one_s_own_has_to_be_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
        _check_answers("--nats-url", f"nats://127.0.0.1:{port}")
        _check_answers("--nats-url", f"nats://127.0.0.1:1,nats://127.0.0.1:{port}")
    with pytest.raises(ConfigError, match="nobody answers there"):
        _check_answers("--nats-url", f"nats://127.0.0.1:{port}")


def test_a_chat_is_drawn_as_its_flags_say(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[SamplingParams] = []

    def note(place: object, sampling: SamplingParams) -> int:
        drawn.append(sampling)
        return 0

    monkeypatch.setattr(chat, "run_chat", note)
    flags = "--seed 7 --max-tokens 3 --temperature 0.5"
    assert run(f"chat --grpc 127.0.0.1:1 {flags}".split()) == 0
    assert drawn == [SamplingParams(max_tokens=3, temperature=0.5, seed=7)]


@pytest.mark.parametrize(("missed", "is_shown"), [(63, False), (64, True)])
async def test_so_many_tokens_that_could_have_been_cached_are_news(
    missed: int, is_shown: bool
) -> None:
    parting = replace(NOT_PARTED, missed_tokens=missed)

    async def events(turns: object, sampling: object) -> AsyncIterator[Any]:
        yield GenerateStarted("req-1", "model", 70, 0, parting)
        yield GenerateFinished(FinishReason.STOP, Usage(70, 1))

    shown = io.StringIO()
    client = cast(Any, SimpleNamespace(generate=events))
    talk = chat.Chat(client, Console(file=shown, width=200), SamplingParams())
    await talk._answer()
    assert ("parts at token" in shown.getvalue()) == is_shown


async def test_an_order_is_given_until_its_process_has_it_or_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roll, "AGAIN_SECONDS", 0.0)
    bus = SimpleNamespace(is_connected=False)
    given: list[str] = []

    class Order:
        async def give(self, _bus: object) -> None:
            given.append("again")
            if len(given) == 1:
                raise DeadlineExceeded("its answer is late")
            bus.is_connected = len(given) == 3
            raise Unavailable("nobody answers")

    await asyncio.wait_for(roll._order(cast(Any, bus), cast(Any, Order())), 60)
    assert len(given) == 3


def test_a_cluster_s_file_names_its_doors_servers_and_processes() -> None:
    locks = SimpleNamespace(ca="")
    given = {variable("max_running", "decode"): "3", "TOKEN": "t"}
    decode = replace(job("", "decode"), role="decode", environment=given)
    plan = SimpleNamespace(
        locks=locks, nats_url="nats://n", redis_url="redis://r", services=(decode,)
    )
    starting = SimpleNamespace(
        _process_plan=plan,
        _doors=lambda kind: [f"{kind}:1", f"{kind}:2"],
        _reached=lambda address: address,
        _choices=SimpleNamespace(
            cluster="blue", served_name="model", engine=SimpleNamespace(model=Path("/models/tiny"))
        ),
        _supervisor=SimpleNamespace(pids={"router": 5}, down={"decode": "was ended"}),
        _model_files={"config.json": "7"},
    )
    told = _Up._cluster(cast(Any, starting))
    assert (told.http, told.grpc) == ("http://http:1,http://http:2", "grpc:1,grpc:2")
    assert (told.nats, told.redis, told.name) == ("nats://n", "redis://r", "blue")
    assert (told.model, told.up_pid, told.ca) == ("model", os.getpid(), "")
    assert (told.pids, told.down) == ({"router": 5}, {"decode": "was ended"})
    assert (told.model_folder, told.model_files) == ("/models/tiny", {"config.json": "7"})
    assert told.settings == {variable("max_running", "decode"): "3"}


def test_a_simulation_is_of_the_demo_model_unless_another_is_named() -> None:
    assert _with_model(SimulateOptions()).state.model == str(demo_model())


async def test_a_cluster_that_runs_is_watched_until_it_ends() -> None:
    done: list[str] = []

    async def for_ever(*_: object) -> None:
        await asyncio.Event().wait()

    async def noted(name: str) -> None:
        done.append(name)

    async def drain(seconds: float) -> bool:
        done.append(f"drain {seconds}")
        return True

    async def watch() -> None:
        done.append("watch")
        raise ConfigError("a process cannot go on")

    locks = SimpleNamespace(watch_broker=for_ever)
    running = SimpleNamespace(
        _end_on_signals=lambda: done.append("signals"),
        _process_plan=SimpleNamespace(locks=locks),
        _renew_broker=None,
        _raise_when_stopped=for_ever,
        _file=SimpleNamespace(run=for_ever),
        _start=lambda: noted("start"),
        _cluster=lambda: "cluster",
        _plans=(),
        _supervisor=SimpleNamespace(watch=watch, drain=drain),
        _choices=SimpleNamespace(drain_seconds=3.0),
    )
    announce = cast(Any, lambda cluster, plans: done.append("announce"))
    assert await _Up.run(cast(Any, running), announce) == EXIT_MISCONFIGURED
    assert done == ["signals", "start", "announce", "watch", "drain 3.0"]
