"""Traces of agents' sessions: as long as the clients' prompts, alike where those are alike."""

from __future__ import annotations

from tools.campaigns.agent_traces import LENGTHS, trace, words

from ferryman.text.chat_beginnings import common_length


def test_sessions_of_one_agent_share_its_instructions_and_not_their_questions() -> None:
    prompts = [traced.prompt for traced in trace(num_sessions=2, gap_seconds=60.0)]
    lengths = [len(prompt.token_ids) for prompt in prompts]
    assert 1_000 < min(lengths) < 2_500
    assert 12_000 < max(lengths) < 20_000
    assert all(prompt.fork_points for prompt in prompts)
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    alike = [common_length(longest.token_ids, other.token_ids) for other in prompts]
    of_same_agent = [length for length in alike if length > 10_000]
    assert len(of_same_agent) >= 2 * 4, "two sessions of four requests"
    # A fork is where the instructions end, so that another session resumes there.
    assert max(longest.fork_points[:3]) <= min(of_same_agent)


def test_words_of_one_place_are_always_the_same() -> None:
    assert words("a", 20) == words("a", 20) != words("b", 20)
    assert len(LENGTHS) == 8
