"""Requests whose masks cannot be made, at two workers on a real model: each ends typed and takes
nothing along, and a sound one that comes after them is answered."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from tests.grammar.guided_model import ORDER, save_guided_model
from tests.harness.pair import WorkerPair, check, hand_off, pair_on
from tests.waiting import until

from ferryman.errors import FerrymanError
from ferryman.grammar.matcher import GrammarMatcher, Mask, MaskSizeDiffers
from ferryman.llm import LLM, Completion
from ferryman.schedule.output_grammar import OutputGrammar
from ferryman.schedule.request import SamplingParams
from ferryman.wire.values import Failure

POISON = "poison"
PROMPT = [(7 * i) % 90 + 5 for i in range(40)]
SOUND = SamplingParams(
    max_tokens=120, temperature=1.0, seed=3, grammar=OutputGrammar.json_schema(ORDER)
)
POISONED = replace(SOUND, grammar=OutputGrammar.regex(f"({POISON}|[a-z])+"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_guided_model(tmp_path_factory.mktemp("poisoned"))


@pytest.fixture(scope="module")
def cold(folder: Path) -> Completion:
    with LLM(folder, dtype="float64", page_size=16, memory_bytes=64 << 20) as llm:
        (answer,) = llm.generate([PROMPT], SOUND)
    return answer


def poison_masks(to: pytest.MonkeyPatch, after: int) -> list[str]:
    """Masks of the poisonous grammar have another size behind `after` tokens of output."""
    original, thrown = GrammarMatcher.fill, list[str]()

    def fill(matcher: GrammarMatcher, mask: Mask) -> bool:
        _, source, _ = matcher._compiled.args  # type: ignore[attr-defined]
        if POISON in source and len(matcher._consumed) >= after:
            thrown.append(source)
            raise MaskSizeDiffers("a word more than the vocabulary has")
        return original(matcher, mask)

    to.setattr(GrammarMatcher, "fill", fill)
    return thrown


async def everything_is_given_back(pair: WorkerPair) -> None:
    await until(lambda: not pair.leased())
    for side in (pair.prefill, pair.decode):
        side.engine.scheduler.check_integrity()
        assert all(ledger.balances for ledger in side.engine.scheduler.ledgers().values())


async def test_a_sound_request_is_answered_after_three_that_poison_prefill(
    folder: Path,
    cold: Completion,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "ferryman")
    async with pair_on(folder, "grpc") as pair:
        thrown = poison_masks(monkeypatch, after=0)
        for number in range(3):
            with pytest.raises(FerrymanError) as failed:
                await hand_off(pair, f"{POISON}-{number}", PROMPT, POISONED)
            assert failed.value.code == "INTERNAL"
            assert len(thrown) > number
        await hand_off(pair, "sound", PROMPT, SOUND)
        await check(pair, "sound", cold)
        await everything_is_given_back(pair)


async def test_a_sound_request_is_answered_beside_three_that_poison_decode(
    folder: Path,
    cold: Completion,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The sound one is under way while they end, and another comes after them."""
    caplog.set_level(logging.CRITICAL, "ferryman")
    async with pair_on(folder, "grpc") as pair:
        thrown = poison_masks(monkeypatch, after=2)
        pair.decode.hold()
        await hand_off(pair, "beside", PROMPT, SOUND)
        for number in range(3):
            await hand_off(pair, f"{POISON}-{number}", PROMPT, POISONED)
        pair.decode.go_on()
        for number in range(3):
            token_ids, last = await pair.read_tokens(f"{POISON}-{number}")
            assert isinstance(last.ending, Failure)
            assert (last.ending.code, len(token_ids)) == ("INTERNAL", 2)
        assert len(thrown) >= 3
        await check(pair, "beside", cold)
        await hand_off(pair, "after", PROMPT, SOUND)
        await check(pair, "after", cold)
        await everything_is_given_back(pair)
