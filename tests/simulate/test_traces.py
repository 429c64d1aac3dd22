"""Traces at the door: what is read, what is refused and where, and what made-up ones are like."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from ferryman.cache.keys import page_keys
from ferryman_simulator.generator import Habits, plan_turns, trace_lines, write_trace
from ferryman_simulator.mooncake import BlockNames, mooncake_line
from ferryman_simulator.options import Format
from ferryman_simulator.run import read_trace
from ferryman_simulator.trace import MAX_LINE_BYTES, BadTrace, SyntheticPrompt, Trace, TracedRequest

GOOD = '{"timestamp": 1000, "input_length": 20, "output_length": 3, "hash_ids": [7, 8]}'


def read(path: Path, form: Format = Format.AUTO, *, block_tokens: int = 16) -> Trace:
    return read_trace(path, form, block_tokens=block_tokens, page_size=16)


def keys_of(request: TracedRequest, page_size: int = 16) -> tuple[bytes, ...]:
    tokens = request.content.token_ids()
    return page_keys(b"root", tokens[: request.prompt_len], page_size)


def test_equal_ids_give_equal_page_keys_and_the_first_other_one_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    records = [
        {"timestamp": 2000, "input_length": 64, "output_length": 1, "hash_ids": [1, 2, 3, 4]},
        {"timestamp": 1000, "input_length": 64, "output_length": 1, "hash_ids": [1, 2, 9, 4]},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    late, early = read(path).requests[::-1]
    assert [late.request_id, early.request_id] == ["line-1", "line-2"]
    mine, theirs = keys_of(late), keys_of(early)
    assert [a == b for a, b in zip(mine, theirs, strict=True)] == [True, True, False, False]


def test_a_next_turn_repeats_the_answer_that_answer_ids_name(tmp_path: Path) -> None:
    names, path = BlockNames(16), tmp_path / "trace.jsonl"
    first, answer = list(range(100, 140)), list(range(10, 40))
    turn = [*first, *answer, *range(500, 530)]
    path.write_text(
        f"{mooncake_line(names, 0.0, first, answer)}\n{mooncake_line(names, 1.0, turn, [1])}\n"
    )
    asked, again = read(path).requests
    said = asked.content.token_ids()[:64]
    assert (said == again.content.token_ids()[:64]).all(), "four of the 70 tokens' full blocks"


def test_fork_points_are_read_as_they_were_written(tmp_path: Path) -> None:
    names, path = BlockNames(16), tmp_path / "trace.jsonl"
    prompt = list(range(100, 140))
    lines = [mooncake_line(names, 0.0, prompt, [1], forks) for forks in ((16, 32), ())]
    path.write_text("".join(f"{line}\n" for line in lines))
    assert [request.fork_points for request in read(path).requests] == [(16, 32), ()]


def test_answers_without_names_are_nobody_elses(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{GOOD}\n{GOOD}\n")
    one, other = read(path).requests
    assert (one.content.token_ids()[:20] == other.content.token_ids()[:20]).all()
    assert (one.content.token_ids()[20:] != other.content.token_ids()[20:]).all()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        pytest.param("{", "no JSON", id="half an object"),
        pytest.param("[1]", "a JSON object", id="a list"),
        pytest.param(GOOD.replace("1000", "-1"), "timestamp", id="before the beginning"),
        pytest.param(GOOD.replace("20", "0"), "input_length", id="an empty prompt"),
        pytest.param(GOOD.replace("20", "true"), "input_length", id="a length that is none"),
        pytest.param(GOOD.replace("3", "99999999999"), "output_length", id="a huge answer"),
        pytest.param(GOOD.replace("[7, 8]", "[7]"), "--block-tokens", id="too few ids"),
        pytest.param(GOOD.replace("[7, 8]", "[7, -8]"), "hash_ids", id="a negative id"),
        pytest.param(GOOD.replace("}", ', "answer_ids": []}'), "answer_ids", id="no answer ids"),
        pytest.param(GOOD.replace("}", ', "fork_points": [-1]}'), "fork_points", id="no position"),
        pytest.param(GOOD.replace("}", ', "fork_points": 5}'), "fork_points", id="one position"),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_number(
    tmp_path: Path, line: str, words: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n")
    with pytest.raises(BadTrace, match=words) as caught:
        read(path)
    assert (caught.value.path, caught.value.line_number) == (str(path), 3)
    assert str(caught.value).startswith(f"{path}:3: ")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"", "no request", id="empty"),
        pytest.param(b"\xff\n", "UTF-8", id="no text"),
        pytest.param(b"{}\n", "neither", id="of no known format"),
        pytest.param(b" " * (MAX_LINE_BYTES + 1), "bytes", id="a line too long"),
    ],
)
def test_what_is_no_trace_is_refused_at_its_first_line(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(BadTrace, match=words) as caught:
        read(path)
    assert caught.value.line_number == 1


def test_a_file_that_is_not_there_is_a_bad_trace(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="No such file"):
        read(tmp_path / "nothing")


def test_content_is_cut_without_changing_what_stays() -> None:
    content = SyntheticPrompt((5, 6, 7), (10, 10, 10))
    assert content.first(17).num_tokens == 17
    assert (content.first(17).token_ids() == content.token_ids()[:17]).all()
    assert content.first(99) == content


def test_the_same_seed_makes_the_same_trace() -> None:
    habits = Habits(num_requests=30, prefix_tokens=40, user_tokens=10, output_tokens=5)
    assert list(trace_lines(habits, 16)) == list(trace_lines(habits, 16))
    other = Habits(num_requests=30, prefix_tokens=40, user_tokens=10, output_tokens=5, seed=1)
    assert list(trace_lines(other, 16)) != list(trace_lines(habits, 16))


def test_few_system_prompts_take_most_conversations_and_turns_grow(tmp_path: Path) -> None:
    habits = Habits(num_requests=600, num_prefixes=10, zipf=1.2, prefix_tokens=64)
    turns = plan_turns(habits)
    firsts = np.bincount([turn.prefix for turn in turns if turn.index == 0], minlength=10)
    assert firsts[0] == firsts.max()
    assert firsts[:2].sum() > firsts[5:].sum(), "Zipf"
    assert [turn.at_seconds for turn in turns] == sorted(turn.at_seconds for turn in turns)
    assert write_trace(tmp_path / "t", habits, 16) == 600
    requests = read(tmp_path / "t").requests
    second = next(turn for turn in turns if turn.index == 1)
    first = next(
        i for i, t in enumerate(turns) if (t.conversation, t.index) == (second.conversation, 0)
    )
    later = requests[turns.index(second)]
    assert later.prompt_len == requests[first].content.num_tokens + second.user_len


@pytest.mark.parametrize(
    "habits",
    [
        {"turns": 0.5},
        {"turns": float("inf")},
        {"zipf": float("nan")},
        {"prefix_tokens": 10**12},
        {"num_requests": 0},
        {"conversations_per_second": 0.0},
    ],
)
def test_habits_that_cannot_be_are_refused(habits: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Habits(**habits)  # type: ignore[arg-type]
