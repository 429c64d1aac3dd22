"""Conversations behind one long system message, through both workers: what of it is found again.

The forks are those that the router tells of real text, the model is a random hybrid of Granite's
shape: a state is exact at one position only, so a prefix without a snapshot at its end is no use.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.harness.pair import WorkerPair, pair_with, request_of, worker_options
from tests.text.folders import CHAT_TEMPLATE, write_folder
from tests.tiny_models import VARIANTS, save_random

from ferryman.cache.manifest import Kind
from ferryman.llm import LLM
from ferryman.schedule.request import SamplingParams
from ferryman.text.chat_beginnings import common_length
from ferryman.text.located_prompt import LocatedPrompt
from ferryman.text.tokenizer import Tokenizer
from ferryman.wire.codec.prefill import progress_from_wire
from ferryman.wire.public import ChatPrompt, ChatTurn
from ferryman.wire.values import PrefillAdmitted
from ferryman_router.served_model import ServedModel

SYSTEM_TOKENS, MAX_POSITIONS, PAGE_SIZE = 6_000, 8192, 16
SAMPLING = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0)
TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT_TEMPLATE
WORDS = "the ferry carries state across the river; seventeen wagons wait, nobody waits for {}. "


@dataclass(frozen=True, slots=True)
class Talk:
    """A pair of workers that answers chats, and the prompts that it had."""

    model: ServedModel
    pair: WorkerPair
    prompts: list[LocatedPrompt]

    async def ask(self, *turns: ChatTurn, tools: int = 0) -> tuple[int, int]:
        """The tokens of a chat that were cached, and those that could have been: whole pages that
        an earlier prompt had in front, too."""
        functions = [
            {"type": "function", "function": {"name": f"f{number}", "description": WORDS}}
            for number in range(tools)
        ]
        variables = json.dumps({"tools": functions}) if tools else ""
        prompt = self.model.tokenized(ChatPrompt(turns, variables=variables), MAX_POSITIONS - 8)
        alike = [common_length(prompt.token_ids, old.token_ids) for old in self.prompts]
        name, ids = f"r{len(self.prompts)}", prompt.token_ids.tolist()
        asked = replace(request_of(self.pair, name, ids, SAMPLING), fork_points=prompt.fork_points)
        told = map(progress_from_wire, await self.pair.run_prefill(self.pair.order(asked)))
        (usage,) = [each.usage for each in told if isinstance(each, PrefillAdmitted)]
        await self.pair.read_answer(name)
        self.prompts.append(prompt)
        return usage.cached.total, max(alike, default=0) // PAGE_SIZE * PAGE_SIZE

    @property
    def num_snapshots(self) -> int:
        """Those that prefill's tree keeps."""
        tree = self.pair.prefill.engine.scheduler.allocator.tree
        return sum(kind is Kind.RECURRENT for kind, _ in tree.units())

    def system(self, about: str = "them") -> ChatTurn:
        """A system message of so many tokens or a few more, the last words about something."""
        one = len(self.model.tokenizer.encode(WORDS))
        return ChatTurn("system", WORDS * (SYSTEM_TOKENS // one + 9) + WORDS.format(about))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("granite")
    write_folder(made)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    vocab = Tokenizer.load(made).vocab_size
    config = VARIANTS["granite_nope"].to_dict()
    config |= {"vocab_size": vocab, "max_position_embeddings": MAX_POSITIONS}
    save_random(made, type(VARIANTS["granite_nope"])(**config), seed=3)
    return made


@pytest.fixture
async def talk(folder: Path) -> AsyncIterator[Talk]:
    prefills = worker_options(folder, chunk_tokens=512, decodes=False)
    async with pair_with(prefills, worker_options(folder)) as pair:
        yield Talk(ServedModel.load(folder, "", 0), pair, [])


def user(words: str) -> ChatTurn:
    return ChatTurn("user", words)


async def test_the_second_conversation_finds_what_it_shares_with_the_first(
    talk: Talk, folder: Path
) -> None:
    """At least 95 of 100 tokens, and the third as well; one slot for all of them."""
    system, shares = talk.system(), []
    for words in ("seventeen wagons?", "nobody waits", "across the river and back"):
        cached, usable = await talk.ask(system, user(words))
        shares.append(cached / usable if usable else 0.0)
        if not usable:
            of_first = talk.num_snapshots
    assert len(talk.prompts[0].token_ids) > SYSTEM_TOKENS
    assert shares[0] == 0.0
    assert min(shares[1:]) >= 0.95
    # The first one's fork and end; an end for each of the others.
    assert (of_first, talk.num_snapshots) == (2, 4)
    answer, _ = await talk.pair.read_answer("r1")
    with LLM(folder, dtype="float64", page_size=PAGE_SIZE) as cold:
        (told,) = cold.generate([talk.prompts[1].token_ids.tolist()], SAMPLING)
    assert tuple(answer.token_ids) == told.token_ids


async def test_a_conversation_that_goes_on_otherwise_is_warm_the_first_time(talk: Talk) -> None:
    """The turns before come all at once, as from an agent that is started again."""
    said = [user("wagons?"), ChatTurn("assistant", "seventeen " * 40), user("and who waits? " * 20)]
    await talk.ask(talk.system(), *said, ChatTurn("assistant", "nobody " * 40), user("why?"))
    before = talk.num_snapshots
    cached, usable = await talk.ask(talk.system(), *said[:2], user("who carries state? " * 20))
    assert cached / usable >= 0.95
    cached, usable = await talk.ask(talk.system(), *said, ChatTurn("assistant", "so"), user("?"))
    assert usable - cached <= 40 * PAGE_SIZE, "what the assistant said otherwise, at most"
    assert before <= 2 + 3


async def test_tools_are_found_behind_another_system_message(talk: Talk) -> None:
    await talk.ask(ChatTurn("system", "on Monday"), user("wagons?"), tools=60)
    cached, usable = await talk.ask(ChatTurn("system", "by night"), user("wagons?"), tools=60)
    assert usable > 1000
    assert cached / usable >= 0.95
