"""The demo's text generator: the same text from the same seed, and one answer a question."""

from __future__ import annotations

from random import Random

import pytest
from tokenizers import Tokenizer
from tools.demo.conversations import LAYOUTS, conversation
from tools.demo.examination import Recall
from tools.demo.lessons import lesson, marked
from tools.demo.stories import story
from tools.demo.vocabulary import END, rendered, token_id, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer()


def test_a_seed_tells_the_same_conversation_again() -> None:
    first = [conversation(Random(seed), 300, talk_share=0.3) for seed in range(20)]
    again = [conversation(Random(seed), 300, talk_share=0.3) for seed in range(20)]
    assert first == again
    assert len({str(messages) for messages in first}) == 20


def test_no_thing_is_in_two_places() -> None:
    told = story(Random(3), num_facts=100, num_distractions=100)
    assert len({fact.subject for fact in told.facts}) == 100
    for fact in told.facts:
        assert told.text.count(f"The {fact.subject} is in ") == 1


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_answers_what_it_asks(name: str) -> None:
    told = story(Random(4), num_facts=6, num_distractions=6)
    messages = LAYOUTS[name](told, list(told.facts))
    answers = [m.text.strip() for m in messages if m.role in ("assistant", "answer")]
    assert [a for a in answers if a in told.sentences] == [f.sentence for f in told.facts]


def test_a_recall_paper_has_the_length_that_was_asked_for(tokenizer: Tokenizer) -> None:
    for seed in range(5):
        paper = Recall(tokenizer, 2000)(Random(seed))
        question = tokenizer.encode(rendered(paper[:1]), add_special_tokens=False)
        assert 1980 <= len(question.ids) <= 2000


def test_a_tokenizer_trains_alike_each_time_and_every_city_is_one_token(
    tokenizer: Tokenizer,
) -> None:
    assert tokenizer.to_str() == train_tokenizer().to_str()
    assert tokenizer.encode("The red kite is in Oslo.").tokens == [
        *("The", "Ġred", "Ġkite", "Ġis", "Ġin", "ĠOslo", "."),
    ]


def test_only_answers_and_their_ends_are_learned(tokenizer: Tokenizer) -> None:
    told = story(Random(5), num_facts=2, num_distractions=1)
    paper = marked(tokenizer, LAYOUTS["one message"](told, list(told.facts)))
    learned = [i for i, counts in zip(paper.token_ids, paper.learned, strict=True) if counts]
    assert tokenizer.decode(learned, skip_special_tokens=False) == "".join(
        fact.sentence + END for fact in told.facts
    )
    assert learned[-1] == token_id(tokenizer, END)


def test_a_lesson_fills_every_row(tokenizer: Tokenizer) -> None:
    given = lesson(tokenizer, Random(6), rows=3, length=256, talk_share=0.3)
    assert given.token_ids.shape == (3, 257)
    assert given.counts.shape == (3, 256)
    assert given.counts.any(1).all()
