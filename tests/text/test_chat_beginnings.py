"""Where conversations of one application part: after tools and system messages, to the token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.text.folders import CHAT_TEMPLATE, write_folder

from ferryman.text import chat_beginnings
from ferryman.text.chat_beginnings import common_length
from ferryman.text.tokenizer import Tokenizer

SYSTEM = {"role": "system", "content": "the ferry carries state across the river"}
TOOLS = {"tools": [{"type": "function", "function": {"name": "wagons"}}]}
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT_TEMPLATE


def user(words: str) -> dict[str, str]:
    return {"role": "user", "content": words}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return with_template(tmp_path, WITH_TOOLS)


def with_template(folder: Path, source: str) -> Tokenizer:
    write_folder(folder)
    (folder / "chat_template.jinja").write_text(source)
    return Tokenizer.load(folder)


def fork_of(tokenizer: Tokenizer, messages: list[dict[str, str]], variables: Any = ()) -> int:
    return max(forks_of(tokenizer, messages, variables), default=0)


def forks_of(
    tokenizer: Tokenizer, messages: list[dict[str, str]], variables: Any = ()
) -> tuple[int, ...]:
    variables = dict(variables)
    ids = tokenizer.encode_chat(messages, variables=variables)
    return tokenizer.chat_beginnings.positions(messages, variables, ids, parse_special=False)


@pytest.mark.parametrize("variables", [{}, TOOLS], ids=["system", "tools too"])
def test_it_is_what_two_conversations_have_in_common(
    tokenizer: Tokenizer, variables: dict[str, Any]
) -> None:
    one, other = [SYSTEM, user("seventeen")], [SYSTEM, user("nobody waits")]
    ids = [tokenizer.encode_chat(chat, variables=variables) for chat in (one, other)]
    assert fork_of(tokenizer, one, variables) == common_length(*ids) > 10
    # Later turns are not looked at.
    longer = [*one, {"role": "assistant", "content": "héllo"}, user("again")]
    assert fork_of(tokenizer, longer, variables) == common_length(*ids)


def test_tools_alone_are_a_beginning_and_a_user_alone_is_none(tokenizer: Tokenizer) -> None:
    assert fork_of(tokenizer, [user("seventeen")], TOOLS) > 10
    assert fork_of(tokenizer, [user("seventeen")]) == 0
    assert fork_of(tokenizer, [SYSTEM]) == 0, "nothing follows that others could say otherwise"


def test_tools_before_a_system_message_are_a_beginning_of_their_own(tokenizer: Tokenizer) -> None:
    """As with an application whose system message names the day, or the folder."""
    one, other = [SYSTEM, user("hi")], [{**SYSTEM, "content": "nobody waits"}, user("hi")]
    ids = [tokenizer.encode_chat(chat, variables=TOOLS) for chat in (one, other)]
    tools, whole = forks_of(tokenizer, one, TOOLS)
    assert tools == common_length(*ids) < whole
    assert forks_of(tokenizer, other, TOOLS)[0] == tools
    assert len(forks_of(tokenizer, one)) == 1, "no tools, one beginning"


def test_a_beginning_is_encoded_once_for_all_conversations_that_have_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[Any] = []

    def counting(self: Tokenizer, messages: Any, **more: Any) -> Any:
        encoded.append(messages)
        return original(self, messages, **more)

    original = Tokenizer.encode_chat
    monkeypatch.setattr(Tokenizer, "encode_chat", counting)
    for words in ("one", "two", "three"):
        fork_of(tokenizer, [SYSTEM, user(words)])
    assert len(encoded) == 3 + 1
    fork_of(tokenizer, [{**SYSTEM, "content": "another"}, user("one")])
    assert len(encoded) == 3 + 1 + 2


def test_a_template_that_takes_no_such_conversation_has_no_fork(tmp_path: Path) -> None:
    refuses = "{% if messages[-1].content != 'seventeen' %}{{ raise_exception('no') }}{% endif %}"
    tokenizer = with_template(tmp_path, refuses + CHAT_TEMPLATE)
    assert fork_of(tokenizer, [SYSTEM, user("seventeen")]) == 0


def test_a_beginning_beyond_the_bound_is_not_encoded_twice(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_beginnings, "MAX_CHARS", 100)
    assert fork_of(tokenizer, [{**SYSTEM, "content": "a" * 100}, user("one")]) == 0
