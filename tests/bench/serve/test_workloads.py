"""Workloads: the same for a seed, with what their names promise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ferryman.errors import ConfigError
from ferryman_bench.serve.trace_workload import trace_sessions
from ferryman_bench.serve.workload import AGENT_SHAPES, WORKLOADS, LoadShape, made_sessions

SHAPE = LoadShape(num_sessions=7, num_turns=3, prompt_words=20, shared_words=60, seed=4)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_makes_the_same_sessions(name: str) -> None:
    sessions = made_sessions(name, SHAPE)
    assert sessions == made_sessions(name, SHAPE)
    assert len(sessions) == 7
    other = LoadShape(7, 3, 20, 60, seed=5)
    assert sessions != made_sessions(name, other)


def test_a_turn_has_all_turns_before_it_and_the_servers_answers() -> None:
    session = made_sessions("chat", SHAPE)[0]
    messages = session.inquiry(2, ("first", "")).messages
    roles = [message.role for message in messages]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert [messages[2].content, messages[4].content] == ["first", "."]
    assert messages[:4] == session.inquiry(1, ("first",)).messages


def test_prompts_behind_one_prefix_share_it_and_random_ones_nothing() -> None:
    systems = {session.system for session in made_sessions("prefix", SHAPE)}
    assert len(systems) == 1
    assert len(systems.pop().split()) == 60
    texts = {session.turns[0].text for session in made_sessions("random", SHAPE)}
    assert len(texts) == 7


def test_agents_of_one_client_share_tools_of_the_recorded_number_and_size() -> None:
    sessions = made_sessions("agents", SHAPE)
    first, again = sessions[0], sessions[len(AGENT_SHAPES)]
    assert first.fields == again.fields
    assert first.system == again.system
    for session, (count, letters) in zip(sessions, AGENT_SHAPES.values(), strict=False):
        assert len(session.fields["tools"]) == count
        assert len(json.dumps(session.fields["tools"])) == pytest.approx(letters, rel=0.4)


def test_a_right_answer_stands_in_the_facts() -> None:
    for session in made_sessions("recall", SHAPE):
        story = session.turns[0].text
        for turn in session.turns:
            question = turn.text.removeprefix(story).strip() or turn.text
            thing = question.rpartition("Where is the ")[2].removesuffix("?")
            assert f"The {thing} is in {turn.answer}." in story


def test_a_trace_keeps_arrivals_lengths_and_what_prompts_share(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 20, "output_length": 3, "hash_ids": [1, 2]},
        {"timestamp": 2000, "input_length": 18, "output_length": 5, "hash_ids": [1, 3]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    first, second = trace_sessions(path, speed=4.0, block_tokens=16)
    assert (first.arrival_seconds, second.arrival_seconds) == (0.0, 0.5)
    assert [session.turns[0].max_tokens for session in (first, second)] == [3, 5]
    words, others = (session.turns[0].text.split() for session in (first, second))
    assert (len(words), len(others)) == (20, 18)
    assert words[:16] == others[:16]
    assert words[16:18] != others[16:]


def test_an_unknown_workload_is_told_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"--workload sleep: give random, prefix, chat, agents"):
        made_sessions("sleep", SHAPE)
