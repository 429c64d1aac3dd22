"""Where the messages of a conversation stand in its token ids, whatever its template does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.folders import CHAT_TEMPLATE, write_folder

from ferryman.text.prompt_layout import PromptLayout
from ferryman.text.tokenizer import Tokenizer

PREFACE = "You are the ferry. the river\n"
STRIPPING = PREFACE + CHAT_TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] | trim }}")
DROPPING = PREFACE + (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
)
Messages = list[dict[str, str]]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    made = {}
    for name, source in [("as it is", PREFACE + CHAT_TEMPLATE), ("stripped", STRIPPING)]:
        folder = tmp_path_factory.mktemp("layout")
        write_folder(folder)
        (folder / "chat_template.jinja").write_text(source)
        made[name] = Tokenizer.load(folder)
    return made


def layout_of(tokenizer: Tokenizer, messages: Messages) -> tuple[PromptLayout, Sequence[int]]:
    ids = tokenizer.encode_chat(messages)
    assert tokenizer.pieces is not None
    return PromptLayout(tokenizer.pieces, ids, messages), ids.tolist()


def spelt(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    assert tokenizer.pieces is not None
    return b"".join(tokenizer.pieces[i] for i in ids).decode(errors="replace")


WORDS = st.text("ab the,.\n é日", min_size=1, max_size=40)


@given(texts=st.lists(WORDS, min_size=1, max_size=6), way=st.sampled_from(["as it is", "stripped"]))
def test_the_tokens_between_two_places_spell_the_message(
    tokenizers: dict[str, Tokenizer], texts: list[str], way: str
) -> None:
    """To the token: one that is cut by a place belongs to the part that it ends in."""
    roles = ["user", "assistant"]
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    layout, ids = layout_of(tokenizers[way], messages)
    last = 0
    for index, text in enumerate(texts):
        words = text if way == "as it is" else text.strip()
        begin, end = layout.begin(index), layout.end(index)
        if begin is None or end is None:
            assert not text.strip()
            continue
        # A token may hold the end of what stands before, or of what follows.
        told, longest = spelt(tokenizers[way], ids[begin : end + 1]), 12
        assert last <= begin <= end
        assert words in told
        assert len(told) <= len(words) + 2 * longest
        last = end


def test_a_short_text_is_not_taken_for_one_that_stands_before(
    tokenizers: dict[str, Tokenizer],
) -> None:
    """`the` is in the template's own words, and in the first message."""
    texts = ["the ferry waits for the river", "the", "the"]
    messages = [{"role": "user", "content": text} for text in texts]
    layout, ids = layout_of(tokenizers["as it is"], messages)
    for index, text in enumerate(texts):
        begin, end = layout.begin(index), layout.end(index)
        assert begin is not None
        assert end is not None
        assert spelt(tokenizers["as it is"], ids[begin:end]) == text


@pytest.mark.parametrize("way", ["as it is", "stripped"])
def test_characters_within_a_message_have_a_position(
    tokenizers: dict[str, Tokenizer], way: str
) -> None:
    text = "  héllo; seventeen wagons wait.  "
    layout, ids = layout_of(tokenizers[way], [{"role": "user", "content": text}])
    begin = layout.begin(0)
    assert begin is not None
    for num_chars in range(len(text) + 1):
        position = layout.after(0, num_chars)
        assert position is not None
        assert position >= begin
        told = spelt(tokenizers[way], ids[begin:position])
        words = text if way == "as it is" else text.strip()
        wanted = text[:num_chars] if way == "as it is" else text[:num_chars].lstrip()
        assert wanted[: len(words)].startswith(told)
        following = spelt(tokenizers[way], ids[position : position + 1])
        assert len(told) + len(following) >= len(wanted[: len(words)])


def test_a_message_that_the_template_drops_has_no_place(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(DROPPING)
    messages = [{"role": "assistant", "content": "wagons"}, {"role": "user", "content": "hi"}]
    layout, _ = layout_of(Tokenizer.load(tmp_path), messages)
    assert layout.begin(0) is None
    assert layout.after(0, 3) is None
    assert layout.begin(1) is not None
