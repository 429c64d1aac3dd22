"""Scripts as chains of tokens, and the sections of docs/clients.md that agents are set up by."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.agents.__main__ import AGENTS
from tools.agents.guide import guide_of
from tools.agents.script import Script, successors

END = 0
CUES = {"<a>": 1, "<b>": 2}


PIECES = ["".join(letters) for size in (1, 2, 3) for letters in product("ab", repeat=size)]


@given(texts=st.tuples(*[st.text("ab", min_size=1, max_size=5)] * 2))
def test_the_chain_behind_a_cue_says_its_text(texts: tuple[str, str]) -> None:
    vocabulary = {piece: token for token, piece in enumerate([*PIECES, *map(str.upper, PIECES)], 3)}
    texts = (texts[0], texts[1].upper())
    scripts = [Script(cue, text) for cue, text in zip(CUES, texts, strict=True)]
    follower = successors(scripts, vocabulary, CUES, END)
    words = {token: piece for piece, token in vocabulary.items()}
    assert tuple(_said(follower, words, CUES[script.cue]) for script in scripts) == texts


def _said(follower: dict[int, int], words: dict[int, str], cue: int) -> str:
    token, text = follower[cue], ""
    while token != END:
        text += words[token]
        token = follower[token]
    return text


def test_a_text_that_would_need_a_token_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="not enough tokens to say 'aa'"):
        successors((Script("<a>", "aa"),), {"a": 3}, CUES, END)
    other_cut = successors((Script("<a>", "aaa"),), {"a": 3, "aa": 4}, CUES, END)
    assert other_cut == {1: 4, 4: 3, 3: END}


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


def test_an_agent_without_a_section_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a section 'nobody'"):
        guide_of("nobody", "http://127.0.0.1:9")
