"""`ferryman verify` over HTTP: its output, its exit status, and commands that show a fault."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import threading
from typing import Any

import pytest
from tests.bench.openai_stand_in import openai_stand_in
from tests.bench.verify.toy_engine import ToyEngine
from tests.bench.verify.toy_faults import LostToken, OffByOne

from ferryman_bench.endpoint.inquiry import Delivery, Inquiry
from ferryman_bench.endpoint.reply import Reply
from ferryman_bench.verify.run import VerifyOptions, examined_endpoint
from ferryman_cli.app import run

CURL = shutil.which("curl")


def verified(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = run(["verify", *arguments, "--json"])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, report


def test_a_fault_ends_with_1_and_two_commands_that_show_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with openai_stand_in(OffByOne()) as url:
        status, report = verified(capsys, url, "--requests", "450", "--max-tokens", "8")
        changed = {way["way"]: way for way in report["ways"] if way["result"] == "changed"}
        assert status == 1
        assert changed
        assert report["cold"] == "a new cache_salt"
        way = next(iter(changed.values()))
        if CURL is not None:
            cold, warm = (shown(way[name]) for name in ("cold_command", "warm_command"))
            assert cold["choices"][0]["logprobs"] != warm["choices"][0]["logprobs"]
            assert cold["usage"]["prompt_tokens"] == warm["usage"]["prompt_tokens"]


def shown(command: str) -> dict[str, Any]:
    ran = subprocess.run(["sh", "-c", command], capture_output=True, check=True, timeout=60)
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


def test_an_exact_server_has_bits_by_the_door_of_texts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with openai_stand_in(ToyEngine()) as url:
        status, report = verified(capsys, f"{url}/v1", "--door", "text", "--requests", "150")
    assert status == 0
    assert report["summary"].startswith("bits: ")
    assert {way["result"] for way in report["ways"]} == {"bits"}


def test_a_table_says_which_way_and_how_far(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with openai_stand_in(LostToken()) as url:
        run(["verify", url, "--requests", "300", "--fillers", "1", "--max-tokens", "8"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("asked again") and line.rstrip().endswith("bits") for line in lines)
    streamed = next(line.split() for line in lines if line.startswith("streamed"))
    assert streamed[-1] in ("noise", "changed")
    assert float(streamed[4]) > 0.1


def test_a_place_without_a_server_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["verify", "http://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err.startswith("error: http://127.0.0.1:1/v1/models: ConnectError")
    assert run(["verify", "http://127.0.0.1:1", "--door", "back"]) == 2
    assert capsys.readouterr().err == "error: --door back: give chat or text\n"


class WatchedEngine(ToyEngine):
    """Says after 60 requests that so many were asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.enough = 0, threading.Event()

    async def ask(self, inquiry: Inquiry, delivery: Delivery = Delivery.WHOLE) -> Reply:
        self.asked += 1
        if self.asked == 60:
            self.enough.set()
        return await super().ask(inquiry, delivery)


async def test_an_interrupted_run_reports_what_it_has_seen() -> None:
    engine = WatchedEngine()
    with openai_stand_in(engine) as url:
        examined = asyncio.ensure_future(examined_endpoint(VerifyOptions(url)))
        await asyncio.to_thread(engine.enough.wait, 60)
        examined.cancel()
        report, _ = await examined
    assert 0 < sum(record.probes for record in report.records) < 200
    assert not report.accused
