"""Scripts as chains of tokens, and the sections of docs/clients.md that agents are set up by."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.agents.__main__ import AGENTS
from tools.agents.guide import guide_of
from tools.agents.script import Script, pieces_of, successors

END = 0
CUES = {"<a>": 1, "<b>": 2}


PUBLISHED = {"a", "b", "ab", "ba", "abb"}


@given(texts=st.tuples(*[st.text("ab", max_size=9)] * 2))
def test_the_chain_behind_a_cue_says_its_text(texts: tuple[str, str]) -> None:
    scripts = [Script(cue, cue + text) for cue, text in zip(CUES, texts, strict=True)]
    pieces = pieces_of(scripts, PUBLISHED)
    tokens = {piece: token for token, piece in enumerate(chain(*pieces.values()), start=3)}
    follower = successors(pieces, tokens, CUES, END)
    words = {token: piece for piece, token in tokens.items()}
    for script in scripts:
        assert _said(follower, words, CUES[script.cue]) == script.text


def _said(follower: dict[int, int], words: dict[int, str], cue: int) -> str:
    token, text = follower[cue], ""
    while token != END:
        text += words[token]
        token = follower[token]
    return text


@pytest.mark.parametrize(
    ("texts", "pieces"),
    [
        (["abab"], [["ab", "a", "b"]]),
        (["ab", "ab"], [["ab"], ["a", "b"]]),
        (["aaa"], [["a", "aa"]]),
    ],
)
def test_a_vocabulary_gets_a_token_where_its_own_are_used_up(
    texts: list[str], pieces: list[list[str]]
) -> None:
    scripts = [Script(cue, text) for cue, text in zip(CUES, texts, strict=False)]
    assert [*pieces_of(scripts, PUBLISHED).values()] == pieces


def test_a_text_without_a_token_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="no token is left to say 'c'"):
        pieces_of([Script(cue, "c") for cue in CUES], PUBLISHED)


@pytest.mark.parametrize("agent", AGENTS)
def test_the_page_says_how_an_agent_is_set_up(agent: str, tmp_path: Path) -> None:
    """Its files name the cluster's address, and none is written outside the two folders."""
    guide = guide_of(agent, "http://127.0.0.1:9")
    guide.write_files(tmp_path / "home", tmp_path / "work")
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) == len(guide.files)
    for path in written:
        if path.suffix == ".json":
            json.loads(path.read_text())
    assert "http://127.0.0.1:9" in guide.commands + "".join(guide.files.values())
    assert "8000" not in guide.commands + "".join(guide.files.values())


@pytest.mark.parametrize("title", ["nobody", "AI SDK, CodeAgent", "nobody, CodeAgent", "TLS"])
def test_an_agent_without_a_section_is_refused(title: str) -> None:
    with pytest.raises(ValueError, match=f"needs a section {title!r}"):
        guide_of(title, "http://127.0.0.1:9")


def test_a_section_in_a_section_has_what_it_does_not_say_from_the_outer_one() -> None:
    outer = guide_of("AI SDK", "http://127.0.0.1:9")
    inner = guide_of("AI SDK, Anthropic's messages", "http://127.0.0.1:9")
    assert inner.commands == outer.commands
    assert inner.files.keys() == outer.files.keys() == {"ask.mjs", "model.mjs"}
    assert inner.files["ask.mjs"] == outer.files["ask.mjs"]
    assert "createAnthropic" in inner.files["model.mjs"]
