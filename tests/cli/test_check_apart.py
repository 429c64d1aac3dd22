"""The check of `up` runs in a process of its own; its answer and its refusal come back."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from ferryman.errors import ConfigError, FerrymanError
from ferryman.hub.client import HubModel
from ferryman_launcher.checks.check_apart import (
    CheckedCluster,
    answer_of,
    answer_to,
    check_apart,
    options_in,
    request_text,
)
from ferryman_launcher.checks.model_places import EVERYTHING_HERE, ModelPlaces
from ferryman_launcher.child import execute
from ferryman_launcher.options import up_options, up_sources


def python(program: str) -> tuple[str, ...]:
    return (sys.executable, "-c", program)


async def test_the_answer_of_a_check_comes_back() -> None:
    said = await answer_of(python("print('{\"notes\": [1]}')"), os.environ, execute)
    assert said == {"notes": [1]}


async def test_a_mistake_comes_back_as_one() -> None:
    def refused() -> CheckedCluster:
        raise ConfigError("--http-port 1: is taken")

    with pytest.raises(ConfigError, match=r"^--http-port 1: is taken$"):
        await answer_of(python(f"print({answer_to(refused)!r})"), os.environ, execute)


async def test_the_death_of_a_check_is_told() -> None:
    program = python("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(FerrymanError, match="ended with status -9"):
        await answer_of(program, os.environ, execute)


def test_options_that_cannot_work_are_refused_from_there(tmp_path: Path) -> None:
    choices = up_options(up_sources({"num_prefill": 1}, {"FERRYMAN_PREFILL_QUANTIZE": "int8"}))
    with pytest.raises(ConfigError, match="quantize is int8 for prefill workers and none for"):
        check_apart(choices, EVERYTHING_HERE, execute)


def test_the_check_has_all_options_but_no_secret() -> None:
    given = {"FERRYMAN_API_KEYS": "sk-secret", "FERRYMAN_DECODE_MAX_RESERVED": "3"}
    choices = up_options(up_sources({"page_size": "32", "host_memory": "64M"}, given))
    places = ModelPlaces({Path("/a"): HubModel("owner/name", "main")}, ("a note",))
    text = request_text(choices, places, 7)
    assert "sk-secret" not in text
    read, found = options_in(json.loads(text))
    told = {role: values for role, values in choices.told.items() if role != "router"}
    sent = choices.model_copy(update={"told": told})
    assert read.model_dump(mode="json") == sent.model_dump(mode="json")
    assert found.snapshots == places.snapshots


def test_what_was_derived_stands_beside_what_one_role_was_told() -> None:
    choices = up_options(up_sources({}, {"FERRYMAN_DECODE_MAX_RESERVED": "3"}))
    derived = {"decode": {"dtype": "float64"}, "prefill": {"dtype": "float32"}}
    told = CheckedCluster((), derived, (), ()).completed(choices).told
    assert told["decode"]["max_reserved"] == "3"
    assert [told[role]["dtype"] for role in ("decode", "prefill")] == ["float64", "float32"]
