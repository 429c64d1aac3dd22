"""One rule for all commands: with --json they print JSON alone, one value or one a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from ferryman_cli.app import app, run
from ferryman_launcher.state_folder import StateFolder

QUIET = {"key": "FILE", "certs": "DIR", "credentials": "DIR --key FILE"}
"""Commands that print nothing, because what they make are files, and what they are given then."""
QUIET_URLS = "DIR --key FILE --nats-url nats://h:1 --redis-url redis://h:1"
EXCEPTIONS = {
    "chat": "a conversation with a person; `generate --json` and the API are for programs",
    "container-credentials": "prints nothing",
    **dict.fromkeys(QUIET, "prints nothing"),
}


def named_commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Every command that the parser knows, by its words."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from named_commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def flags_of(command: Any) -> set[str]:
    return {flag for parameter in command.params for flag in parameter.opts}


COMMANDS = dict(named_commands(typer.main.get_command(app)))


def test_every_command_takes_json_unless_a_reason_is_listed() -> None:
    assert {"trace", "top", "bench tiers", "bench serve"} <= set(COMMANDS), "all are enumerated"
    without = {name for name, command in COMMANDS.items() if "--json" not in flags_of(command)}
    assert without == set(EXCEPTIONS)


@pytest.mark.parametrize(
    "line",
    [*(f"{name} {line}" for name, line in QUIET.items()), f"container-credentials {QUIET_URLS}"],
)
def test_a_command_that_is_excepted_for_its_silence_prints_nothing(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"FILE": str(tmp_path / "key"), "DIR": str(tmp_path / "folder")}
    assert run([places.get(word, word) for word in line.split()]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("line", ["models", "models granite", "fit", "config", "config --show"])
def test_a_command_prints_json_and_nothing_else(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*line.split(), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)
    assert said.out.count("\n") == 1 or line.startswith("models")


def test_the_settings_of_both_formats_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "--json", "--page-size", "32"]) == 0
    settings = json.loads(capsys.readouterr().out)
    assert settings["cluster"]["page_size"] == {"value": 32, "origin": "flag --page-size"}
    assert run(["config", "--show", "--page-size", "32"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if " = " in line]
    listed = [
        f"{name} = {json.dumps(setting['value'])}  # {setting['origin']}"
        for role in settings.values()
        for name, setting in role.items()
    ]
    assert listed == lines


def test_lines_of_logs_are_objects_with_the_name_of_their_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = StateFolder(tmp_path)
    folder.log_path("decode").write_text("one\n")
    folder.log_path("router").write_text('{"event": "ready"}\n')
    assert run(["logs", "--json", "--state-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert list(map(json.loads, lines)) == [
        {"log": "decode", "line": "one"},
        {"log": "router", "line": '{"event": "ready"}'},
    ]
