"""`ferryman bench serve` over HTTP: results, the page, and two runs compared."""

from __future__ import annotations

import asyncio
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.bench.openai_stand_in import openai_stand_in
from tests.bench.verify.toy_engine import ToyEngine

from ferryman_bench.endpoint.client import EndpointRefusal
from ferryman_bench.endpoint.inquiry import Delivery, Inquiry
from ferryman_bench.endpoint.reply import Reply, ReportedUsage
from ferryman_bench.serve.load_run import FullLoop, LoadRun, OpenLoop, own_ends
from ferryman_bench.serve.workload import LoadShape, made_sessions
from ferryman_cli.app import run

SMALL = ("--sessions", "6", "--turns", "3", "--prompt-words", "12", "--shared-words", "40")


def served(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["bench", "serve", *arguments, *SMALL, "--answer-tokens", "5", "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_turns_of_a_session_follow_each_other_and_reuse_what_they_share(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with openai_stand_in(ToyEngine()) as url:
        result = served(capsys, url, "--workload", "chat", "--concurrent", "2")
    assert result["title"] == "chat: 6 sessions, 18 turns, 2 at once"
    assert result["totals"]["requests"] == 18
    assert result["totals"]["errors"] == 0
    assert result["totals"]["cached_share"] > 0.3
    for session in range(6):
        turns = [turn for turn in result["turns"] if turn["session"] == session]
        assert [turn["turn"] for turn in turns] == [0, 1, 2]
        assert all(before["ended"] <= after["sent"] for before, after in pairwise(turns))
        assert all(turn["completion_tokens"] == 5 for turn in turns)
    names = [row["name"] for row in result["rows"]]
    assert names[:3] == ["tokens", "requests", "good requests"]
    assert "first token, later turns" in names


def test_a_page_loads_nothing_and_has_its_plots_within(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` has it")
    page = tmp_path / "page.html"
    with openai_stand_in(ToyEngine()) as url:
        served(capsys, url, "--workload", "prefix", "--html", str(page))
    text = page.read_text()
    assert text.count("<svg") == 3
    assert not re.search(r"<(script|link|img|iframe)|@import|url\(\s*['\"]?http", text)
    assert all(not link.startswith("http") for link in re.findall(r'(?:src|href)="([^"]+)"', text))
    assert "prefix: 6 sessions, 6 turns, 8 at once" in text


def test_two_runs_are_compared_with_intervals_and_never_across_processors(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    with openai_stand_in(ToyEngine()) as url:
        for path in (old, new):
            path.write_text(json.dumps(served(capsys, url, "--rate", "500")))
    assert run(["bench", "compare", str(old), str(new), "--json"]) == 0
    middle, low, high = json.loads(capsys.readouterr().out)["intervals"]["first token"]
    assert low <= middle <= high
    assert run(["bench", "compare", str(old), str(new)]) == 0
    assert re.search(r"first token .* \(\d\.\d\d to \d+\.\d\d\)", capsys.readouterr().out)
    moved = json.loads(new.read_text())
    moved["machine"]["processor"] = "Another 9000"
    new.write_text(json.dumps(moved))
    assert run(["bench", "compare", str(old), str(new)]) == 2
    assert "different processors" in capsys.readouterr().err


class CrowdedEngine:
    """Counts how many requests run at once, and refuses the third."""

    def __init__(self) -> None:
        self.running = self.most = self.asked = 0

    async def ask(self, inquiry: Inquiry, delivery: Delivery = Delivery.WHOLE) -> Reply:
        self.asked += 1
        number = self.asked
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await _others_run()
        finally:
            self.running -= 1
        if number == 3:
            raise EndpointRefusal("HTTP 503: full", 503)
        return Reply("yes", (), "stop", ReportedUsage(10, 1), (0.0,), 0.0)


async def _others_run() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("loop", [FullLoop(3), OpenLoop(1e6)], ids=str)
async def test_a_refusal_ends_its_session_and_no_other(loop: FullLoop | OpenLoop) -> None:
    engine, sessions = CrowdedEngine(), made_sessions("chat", LoadShape(9, 2, 5, 5))
    records = await LoadRun(engine, own_ends).run(sessions, loop)
    assert sum(bool(record.error) for record in records) == 1
    assert len(records) == 17
    assert {record.session for record in records} == set(range(9))
    assert engine.most == 3 if isinstance(loop, FullLoop) else engine.most > 3
