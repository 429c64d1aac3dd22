"""Two hundred schemas: every output parses and is valid, and drafts change none of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tests.grammar.guided_model import save_guided_model
from tests.grammar.schema_corpus import GRAMMARS, SCHEMAS, check_valid
from tests.grammar.walks import walk

from ferryman.grammar.compiler import GrammarCompiler
from ferryman.llm import LLM, Completion
from ferryman.schedule.request import SamplingParams
from ferryman.text.tokenizer import Tokenizer

PROMPT = "the ferry carries state: "


def test_there_are_two_hundred_different_schemas() -> None:
    assert len(set(GRAMMARS)) >= 200


def test_every_walk_along_the_masks_of_a_schema_is_valid(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    for schema, grammar in zip(SCHEMAS, GRAMMARS, strict=True):
        for seed in range(2):
            token_ids = walk(compiler.compiled(grammar).matcher(), tokenizer, random.Random(seed))
            text = b"".join(tokenizer.token_bytes(i) for i in token_ids).decode()
            check_valid(schema, text)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_answer_of_a_model_is_valid_and_drafts_change_none(tmp_path: Path) -> None:
    folder = save_guided_model(tmp_path / "guided")
    params = [
        SamplingParams(max_tokens=700, temperature=3.0, seed=index, grammar=grammar)
        for index, grammar in enumerate(GRAMMARS)
    ]

    def answers(**options: Any) -> list[Completion]:
        chosen = {"dtype": "float64", "page_size": 16, "max_running": 32, **options}
        with LLM(folder, memory_bytes=256 << 20, **chosen) as llm:
            return llm.generate([PROMPT] * len(params), params)

    plain, drafted = answers(overlap=True), answers(draft="ngram", draft_tokens=4)
    whole = [answer.finish_reason == "stop" for answer in plain]
    assert sum(whole) >= 200, "max_tokens cuts few: random weights may write long numbers"
    for schema, answer, other in zip(SCHEMAS, plain, drafted, strict=True):
        if answer.finish_reason == "stop":
            check_valid(schema, answer.text)
        assert (answer.token_ids, answer.finish_reason) == (other.token_ids, other.finish_reason)
