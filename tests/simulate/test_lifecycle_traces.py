"""Lifecycle logs as traces: what chains tell, what is left out, what is told of time."""

from __future__ import annotations

from pathlib import Path

import pytest

from ferryman.cache.keys import as_token_ids, page_keys
from ferryman.handoff.chain_prints import chain_prints, encode_prints
from ferryman.handoff.lifecycle import DECODE, PREFILL, ROUTER, LifecycleEntry
from ferryman.runtime.lifecycle import encode_event
from ferryman_simulator.options import Format
from ferryman_simulator.run import read_trace
from ferryman_simulator.trace import BadTrace, Trace

PAGE = 16
Facts = dict[str, object]


def event(role: str, name: str, request_id: str, at_ms: float, **facts: object) -> str:
    said = LifecycleEntry(
        role, f"{role}-1", 1, request_id, 1, 1, name, facts, unix_ms=int(at_ms), elapsed_ms=at_ms
    )
    return encode_event(said).decode()


def chain_of(tokens: list[int]) -> Facts:
    keys = page_keys(b"root", as_token_ids(tokens), PAGE)
    return {"page_size": PAGE, "chain": encode_prints(chain_prints(keys))}


def told(request_id: str, at_ms: int, prompt: list[int], answer: list[int]) -> list[str]:
    """The router's events of a request that ended well."""
    received = {"tokens": len(prompt), **chain_of(prompt)}
    finished = {"tokens": len(answer), "itl_p50_ms": 8.0, **chain_of(prompt + answer)}
    return [
        event(ROUTER, "received", request_id, at_ms, **received),
        event(ROUTER, "finished", request_id, at_ms + 50, **finished),
    ]


def read(tmp_path: Path, lines: list[str], page_size: int = PAGE) -> Trace:
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(lines))
    return read_trace(path, Format.AUTO, block_tokens=512, page_size=page_size)


def shared_tokens(trace: Trace) -> int:
    first, second = (request.content.token_ids() for request in trace.requests)
    length = min(len(first), len(second))
    same = first[:length] == second[:length]
    return length if same.all() else int(same.argmin())


def test_a_next_turn_shares_all_full_pages_of_prompt_and_answer(tmp_path: Path) -> None:
    prompt, answer = list(range(100, 150)), list(range(40))
    turn = [*prompt, *answer, *range(300, 320)]
    trace = read(tmp_path, [*told("b", 2000, turn, [1]), *told("a", 1000, prompt, answer)])
    assert [request.request_id for request in trace.requests] == ["a", "b"]
    assert [request.prompt_len for request in trace.requests] == [50, 110]
    assert shared_tokens(trace) == 90 // PAGE * PAGE


def test_prompts_that_part_share_up_to_there(tmp_path: Path) -> None:
    head = list(range(64))
    trace = read(tmp_path, [*told("a", 0, [*head, *[1] * 40], [1]), *told("b", 1, [*head, 9], [1])])
    assert shared_tokens(trace) == 64


def test_a_long_and_a_short_prompt_share_at_the_coarser_step(tmp_path: Path) -> None:
    head = list(range(11 * PAGE))
    long = [*head, *[7] * (100 * PAGE)]
    trace = read(tmp_path, [*told("a", 0, long, [1]), *told("b", 1, [*head, 8], [1])])
    assert shared_tokens(trace) == 10 * PAGE, "111 pages have a print every 2"


def test_requests_that_did_not_end_well_are_left_out_and_counted(tmp_path: Path) -> None:
    lines = [*told("a", 0, [1] * 20, [1]), *told("b", 5, [2] * 20, [1])[:1]]
    trace = read(tmp_path, lines)
    assert ([request.request_id for request in trace.requests], trace.num_left_out) == (["a"], 1)


def test_chunks_and_gaps_tell_the_pace(tmp_path: Path) -> None:
    chunks = [
        event(PREFILL, "admitted", "a", 10.0),
        event(PREFILL, "chunk", "a", 30.0, start=0, end=10),
        event(PREFILL, "chunk", "a", 50.0, start=10, end=20),
    ]
    pace = read(tmp_path, [*told("a", 0, [1] * 20, [1]), *chunks]).pace
    assert pace.prefill_seconds_per_token == pytest.approx(0.002)
    assert pace.decode_step_seconds == pytest.approx(0.008)


def test_a_decode_worker_tells_its_steps_where_clients_get_tokens_in_bunches(
    tmp_path: Path,
) -> None:
    draws = [
        event(DECODE, "first_token", "a", 30.0, offset=0),
        event(DECODE, "finished", "a", 75.0, tokens=10, reason="length"),
    ]
    pace = read(tmp_path, [*told("a", 0, [1] * 20, [1]), *draws]).pace
    assert pace.decode_step_seconds == pytest.approx(0.005), "and not the 8 ms between pieces"


def test_fork_points_are_those_that_prefill_was_told(tmp_path: Path) -> None:
    first, *rest = told("a", 0, [1] * 40, [1])
    queued = event(PREFILL, "queued", "a", 1.0, position=1, forks=[16, 32, 64])
    (request,) = read(tmp_path, [first, queued, *rest]).requests
    assert request.fork_points == (16, 32), "and none behind the prompt"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        pytest.param(
            event(PREFILL, "queued", "a", 0, forks=[3, "x"]), "forks should be", id="forks"
        ),
        pytest.param("{}", "version", id="no event"),
        pytest.param(event(ROUTER, "received", "x", 0, tokens=-1), "tokens", id="a length"),
        pytest.param(
            event(ROUTER, "received", "x", 0, tokens=9, page_size=PAGE, chain="x"),
            "no prints",
            id="a chain that is none",
        ),
        pytest.param(
            event(ROUTER, "received", "x", 0, tokens=9, page_size=64, chain="1:"),
            "--page-size",
            id="pages of another size",
        ),
    ],
)
def test_a_bad_event_is_named_with_its_line(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(BadTrace, match=words) as caught:
        read(tmp_path, [*told("a", 0, [1] * 20, [1]), line])
    assert caught.value.line_number == 3
