"""The ways in which an engine may reuse state, each as what to ask before and beside a question.

A way asks its last question with the same fields as what it asked before, so that the engine may
reuse state; the same question is asked cold by others. Each question is new.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random

from ferryman_bench.endpoint.client import AskedEngine
from ferryman_bench.endpoint.inquiry import ChatMessage, Delivery, Inquiry
from ferryman_bench.endpoint.reply import Reply
from ferryman_bench.story import PLACES, WORDS_OF_A_FACT, FactStory, StoryFact, make_story

CROWD = 4
SHORT_FACTS, LONG_FACTS = 6, 30
FILLER_FACTS = 60
_MOST_NONCE = 10**6


@dataclass(frozen=True, slots=True)
class SentInquiry:
    """One request of a way, so that it can be shown; those with `is_beside` are sent at once with
    the next that has not."""

    inquiry: Inquiry
    delivery: Delivery = Delivery.WHOLE
    is_beside: bool = False


@dataclass(frozen=True, slots=True)
class WarmReply:
    """The answer to the last of `sent`, which is the question. `early` are first answers to it,
    when it was as new as a cold one."""

    sent: tuple[SentInquiry, ...]
    reply: Reply
    early: tuple[Reply, ...] = ()

    @property
    def question(self) -> Inquiry:
        return self.sent[-1].inquiry


@dataclass(frozen=True, slots=True)
class Material:
    """Makes the questions of one probe. `num_fillers` prompts push others out of the cache."""

    random: Random
    max_tokens: int
    num_fillers: int

    def story(self) -> FactStory:
        return make_story(self.random, self.random.randint(SHORT_FACTS, LONG_FACTS))

    def question(self, text: str, fact: StoryFact) -> Inquiry:
        return self.inquiry(f"{text} {fact.question}")

    def inquiry(self, *turns: str) -> Inquiry:
        """A chat whose turns are the user's and the assistant's in turn."""
        roles = ("user", "assistant")
        messages = (ChatMessage(roles[place % 2], text) for place, text in enumerate(turns))
        return Inquiry(tuple(messages), self.max_tokens)

    def new_question(self) -> Inquiry:
        """A question that no other probe has asked."""
        story = self.story()
        number = self.random.randrange(_MOST_NONCE)
        return self.question(f"Story {number}: {story}", self.random.choice(story.facts))

    def filler(self) -> Inquiry:
        story = make_story(self.random, FILLER_FACTS)
        number = self.random.randrange(_MOST_NONCE)
        made = self.question(f"Story {number}: {story}", self.random.choice(story.facts))
        return Inquiry(made.messages, 1)

    def with_shared_prefix(self) -> list[Inquiry]:
        """Prompts with a common beginning of any length, about which all of them ask; they differ
        from the next word on."""
        story, number = self.story(), self.random.randrange(_MOST_NONCE)
        length = self.random.randint(1, story.num_words)
        shared = f"Story {number}: {story.first(length)}"
        fact = self.random.choice(story.facts)
        endings = (make_story(self.random, SHORT_FACTS) for _ in range(CROWD))
        return [self.question(f"{shared} {ending}", fact) for ending in endings]

    def twins(self) -> tuple[Inquiry, Inquiry]:
        """Two questions that differ in one word anywhere before their last fact."""
        story, number = self.story(), self.random.randrange(_MOST_NONCE)
        words = f"Story {number}: {story}".split()
        fact, place = story.facts[-1], self.random.randint(2, len(words) - WORDS_OF_A_FACT - 1)
        text = " ".join(words)
        words[place] = self.random.choice([name for name in PLACES if name != words[place]])
        return self.question(text, fact), self.question(" ".join(words), fact)


Play = Callable[[AskedEngine, Material], Awaitable[WarmReply]]


async def again(asker: AskedEngine, material: Material) -> WarmReply:
    """The whole prompt was asked before."""
    question = material.new_question()
    early = await asker.ask(question)
    reply = await asker.ask(question)
    return WarmReply((SentInquiry(question),) * 2, reply, (early,))


async def behind_prefix(asker: AskedEngine, material: Material) -> WarmReply:
    """Two other prompts begin as this one does."""
    question, *others = material.with_shared_prefix()[:3]
    sent = [SentInquiry(other) for other in others]
    for other in others:
        await asker.ask(other)
    reply = await asker.ask(question)
    return WarmReply((*sent, SentInquiry(question)), reply)


async def beside_twin(asker: AskedEngine, material: Material) -> WarmReply:
    """A prompt was asked that differs in one word, and goes on as this one does."""
    question, twin = material.twins()
    await asker.ask(twin)
    reply = await asker.ask(question)
    return WarmReply((SentInquiry(twin), SentInquiry(question)), reply)


async def within_longer(asker: AskedEngine, material: Material) -> WarmReply:
    """A longer prompt begins with the whole of this one, so state exists beyond its end."""
    question = material.new_question()
    text = question.messages[0].content
    longer = material.question(f"{text} {material.story()}", material.story().facts[0])
    await asker.ask(longer)
    reply = await asker.ask(question)
    return WarmReply((SentInquiry(longer), SentInquiry(question)), reply)


async def third_turn(asker: AskedEngine, material: Material) -> WarmReply:
    """Two turns of the conversation, with the engine's own answers, came before."""
    story = material.story()
    texts = [f"Story {material.random.randrange(_MOST_NONCE)}: {story} {story.facts[0].question}"]
    sent: list[SentInquiry] = []
    for fact in material.random.sample(story.facts, 2):
        inquiry = material.inquiry(*texts)
        sent.append(SentInquiry(inquiry))
        answer = await asker.ask(inquiry)
        texts += [answer.text or "?", fact.question]
    question = material.inquiry(*texts)
    reply = await asker.ask(question)
    return WarmReply((*sent, SentInquiry(question)), reply)


async def after_eviction(asker: AskedEngine, material: Material) -> WarmReply:
    """The prompt was asked, and others since, which may have taken its memory."""
    question = material.new_question()
    fillers = [material.filler() for _ in range(material.num_fillers)]
    early = await asker.ask(question)
    for filler in fillers:
        await asker.ask(filler)
    reply = await asker.ask(question)
    sent = map(SentInquiry, (question, *fillers, question))
    return WarmReply(tuple(sent), reply, (early,))


async def in_crowd(asker: AskedEngine, material: Material) -> WarmReply:
    """Prompts with the same beginning are asked, and others of that beginning at the same time."""
    question, first, *others = material.with_shared_prefix()
    await asker.ask(first)
    reply = await _asked_at_once(asker, question, others)
    beside = (SentInquiry(other, is_beside=True) for other in others)
    return WarmReply((SentInquiry(first), *beside, SentInquiry(question)), reply)


async def among_strangers(asker: AskedEngine, material: Material) -> WarmReply:
    """Unrelated prompts are asked at the same time; nothing can be reused."""
    question, *others = (material.new_question() for _ in range(CROWD))
    reply = await _asked_at_once(asker, question, others)
    beside = (SentInquiry(other, is_beside=True) for other in others)
    return WarmReply((*beside, SentInquiry(question)), reply)


async def streamed(asker: AskedEngine, material: Material) -> WarmReply:
    """The answer is streamed; nothing can be reused."""
    question = material.new_question()
    reply = await asker.ask(question, Delivery.STREAMED)
    return WarmReply((SentInquiry(question, Delivery.STREAMED),), reply)


async def after_cut(asker: AskedEngine, material: Material) -> WarmReply:
    """A client asked for the same and hung up after some tokens."""
    question = material.new_question()
    await asker.ask(question, Delivery.CUT)
    reply = await asker.ask(question)
    return WarmReply((SentInquiry(question, Delivery.CUT), SentInquiry(question)), reply)


async def _asked_at_once(asker: AskedEngine, question: Inquiry, others: Sequence[Inquiry]) -> Reply:
    async with asyncio.TaskGroup() as group:
        for other in others:
            group.create_task(asker.ask(other))
        asked = group.create_task(asker.ask(question))
    return asked.result()


STRANGERS = "among strangers"
REUSE_WAYS: dict[str, Play] = {
    "asked again": again,
    "behind a shared prefix": behind_prefix,
    "beside a near twin": beside_twin,
    "within a longer prompt": within_longer,
    "in a third turn": third_turn,
    "after eviction": after_eviction,
    "in a crowd of one prefix": in_crowd,
    STRANGERS: among_strangers,
    "streamed": streamed,
    "after a cut stream": after_cut,
}
