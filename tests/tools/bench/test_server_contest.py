"""The table of whole servers, from records with known times, and a server that does not start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tools.bench.server_contest import (
    ContestServer,
    ServerContestOptions,
    contest_cases,
    contest_servers,
    running_server,
    table_lines,
)

from ferryman.errors import ConfigError
from ferryman_bench.serve.load_run import ignoring_ends
from ferryman_bench.serve.turn_record import TurnRecord


def records_of(first: float, gap: float, case: str) -> list[TurnRecord]:
    """All turns of a case, one after the other, each with its first token and four gaps."""
    sessions = next(made.sessions for made in contest_cases(1) if made.name == case)
    records, now = list[TurnRecord](), 0.0
    for session, made in enumerate(sessions):
        for turn in range(len(made.turns)):
            arrivals = tuple(now + first + gap * place for place in range(5))
            records.append(TurnRecord(session, turn, now, arrivals[-1], arrivals, 10, 5))
            now = arrivals[-1]
    return records


def test_each_row_of_the_table_has_a_figure_of_each_server() -> None:
    results = {
        name: {case.name: records_of(first, gap, case.name) for case in contest_cases(1)}
        for name, first, gap in (("ours", 0.5, 0.125), ("theirs", 1.0, 0.25))
    }
    lines = table_lines(results)
    assert lines[0] == "|  | ours | theirs |"
    assert "| 1 stream: tokens in a second | 5 | 2.5 |" in lines
    assert "| 24 streams: tokens in a second | 5 | 2.5 |" in lines
    assert (
        "| 8 streams: first token p50; gap p50 / p99, ms | 500; 125 / 125 | 1,000; 250 / 250 |"
        in (lines)
    )
    assert "| first tokens of turns 2 to 10 of a chat, p50, ms | 500 | 1,000 |" in lines
    assert len(lines) == 12


def test_both_servers_have_the_same_prompts_and_no_two_cases_share_one() -> None:
    cases = contest_cases(1)
    assert cases == contest_cases(1)
    texts = [turn.text for case in cases for made in case.sessions for turn in made.turns]
    assert len(texts) == len(set(texts))
    assert [len(case.sessions) for case in cases] == [4, 8, 24, 1, 8, 6]
    assert len(cases[3].sessions[0].turns) == 10


def test_neither_server_may_draw_an_end_of_text_before_the_last_token() -> None:
    """An end has no text, so two tokens would come as one piece, and one gap be as long as two."""
    ours, theirs = contest_servers(ServerContestOptions(Path(), Path(), Path()), Path())
    assert ours.ends(96) == {"min_tokens": 96}
    assert theirs.ends(96) == {"ignore_eos": True}


def test_a_server_that_ends_at_once_is_named_with_its_last_words(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "print('no such model'); raise SystemExit(3)")
    server = ContestServer("broken", command, "http://127.0.0.1:1", ignoring_ends)
    with (
        pytest.raises(ConfigError, match="broken did not start: no such model"),
        running_server(server, tmp_path),
    ):
        pass
