"""The demo's text generator: the same text from the same seed, and one answer a question."""

from __future__ import annotations

import ast
from random import Random

import pytest
from tokenizers import Tokenizer
from tools.demo.conversations import LAYOUTS, conversation
from tools.demo.curriculum import labelled, training_batch
from tools.demo.evaluation import Recall
from tools.demo.stories import story
from tools.demo.tool_turns import call_turn, idle_tool_turn, literal_turn
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
    given_story = story(Random(3), num_facts=100, num_distractions=100)
    assert len({fact.subject for fact in given_story.facts}) == 100
    for fact in given_story.facts:
        assert given_story.text.count(f"The {fact.subject} is in ") == 1


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_answers_what_it_asks(name: str) -> None:
    given_story = story(Random(4), num_facts=6, num_distractions=6)
    messages = LAYOUTS[name](given_story, list(given_story.facts))
    answers = [m.text.strip() for m in messages if m.role in ("assistant", "answer")]
    assert [a for a in answers if a in given_story.sentences] == [
        f.sentence for f in given_story.facts
    ]


def test_a_call_completes_its_beginning_with_words_of_the_question() -> None:
    for seed in range(40):
        asked, begun, called, result, told = call_turn(Random(seed))
        assert called.text.startswith(begun.text)
        (call,) = ast.parse(called.text, mode="eval").body.elts  # type: ignore[attr-defined]
        assert call.keywords[0].value.value in asked.text.rpartition("\n")[2]
        assert result.text == f"Repeat:\n{told.text}"


def test_a_tool_that_is_not_needed_changes_no_answer() -> None:
    for seed in range(40):
        said, begun, answer = idle_tool_turn(Random(seed))
        assert (said.role, begun.role, answer.role) == ("user", "system", "assistant")
        assert not answer.text.startswith(begun.text)
        asked, copied = literal_turn(Random(seed))
        assert asked.text == f"Repeat:\n{copied.text}"


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
    given_story = story(Random(5), num_facts=2, num_distractions=1)
    paper = labelled(tokenizer, LAYOUTS["one message"](given_story, list(given_story.facts)))
    learned = [i for i, counts in zip(paper.token_ids, paper.learned, strict=True) if counts]
    assert tokenizer.decode(learned, skip_special_tokens=False) == "".join(
        fact.sentence + END for fact in given_story.facts
    )
    assert learned[-1] == token_id(tokenizer, END)


def test_a_lesson_fills_every_row(tokenizer: Tokenizer) -> None:
    given = training_batch(tokenizer, Random(6), rows=3, length=256, talk_share=0.3)
    assert given.token_ids.shape == (3, 257)
    assert given.counts.shape == (3, 256)
    assert given.counts.any(1).all()
