"""Structured outputs of the offline engine: valid, ended where the grammar ends, and the same with
overlap, drafts, retraction, another batch, and after another attempt began them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.grammar.guided_model import GUIDES, Guide, save_guided_model

from ferryman.errors import InvalidRequest
from ferryman.llm import LLM, Completion, EngineCounts
from ferryman.schedule.output_grammar import OutputGrammar
from ferryman.schedule.request import SamplingParams

PROMPT = "the ferry carries state; "
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.7, "seed": 4, "top_p": 0.9, "frequency_penalty": 0.4},
    {"temperature": 1.0, "seed": 5, "top_k": 300, "min_p": 0.001},
)
PLAIN: dict[str, Any] = {"overlap": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_guided_model(tmp_path_factory.mktemp("guided"))


def asked() -> list[tuple[Guide, SamplingParams]]:
    return [
        (guide, SamplingParams(max_tokens=300, grammar=guide.grammar, **way))
        for guide in GUIDES
        for way in WAYS
    ]


def run(folder: Path, **options: Any) -> tuple[list[Completion], EngineCounts]:
    """All guides in all ways, beside requests without one."""
    free = [SamplingParams(max_tokens=40, temperature=1.0, seed=seed) for seed in range(3)]
    params = [params for _, params in asked()] + free
    chosen = {"dtype": "float64", "page_size": 16, "chunk_tokens": 32, "max_running": 6, **options}
    with LLM(folder, **chosen) as llm:
        answers = llm.generate([PROMPT] * len(params), params)
        llm.check_integrity()
        return answers, llm.counts


@pytest.fixture(scope="module")
def plain(folder: Path) -> Sequence[Completion]:
    answers, _ = run(folder, **PLAIN)
    return answers


def same(found: Sequence[Completion], others: Sequence[Completion]) -> bool:
    return [(a.token_ids, a.text, a.finish_reason) for a in found] == [
        (a.token_ids, a.text, a.finish_reason) for a in others
    ]


def test_every_output_is_of_its_grammar_and_ends_by_itself(plain: Sequence[Completion]) -> None:
    for (guide, params), answer in zip(asked(), plain, strict=False):
        assert answer.finish_reason == "stop", (guide.name, params)
        assert guide.is_right(answer.text), (guide.name, params, answer.text)


@pytest.mark.parametrize("draft", ["", "ngram"])
@pytest.mark.parametrize("vocab_size", [319, 320, 321, 340, 341, 342, 352])
def test_outputs_keep_to_tokens_that_model_and_tokenizer_share(
    tmp_path: Path, vocab_size: int, draft: str
) -> None:
    """The tokenizer has 341 tokens. A forced run is proposed as drafts, and a draft without a row
    in the embedding ended the engine."""
    folder = save_guided_model(tmp_path, vocab_size=vocab_size)
    params = [SamplingParams(max_tokens=300, grammar=guide.grammar, **WAYS[1]) for guide in GUIDES]
    options = {"dtype": "float64", "page_size": 16, "draft": draft, "draft_tokens": 5}
    with LLM(folder, **options) as llm:
        answers = llm.generate([[10, 11, 12]] * len(params), params)
        llm.check_integrity()
    for guide, answer in zip(GUIDES, answers, strict=True):
        assert guide.is_right(answer.text), (guide.name, answer.text)
        assert max(answer.token_ids) < vocab_size


def test_a_text_with_a_token_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    folder = save_guided_model(tmp_path, vocab_size=300)
    with LLM(folder, dtype="float64", page_size=16) as llm:
        with pytest.raises(InvalidRequest, match="the vocabulary has 300"):
            llm.generate(PROMPT)
        (answer,) = llm.generate([[10, 11]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(answer.token_ids) == 3


def test_steps_in_flight_change_no_token(folder: Path, plain: Sequence[Completion]) -> None:
    found, _ = run(folder)
    assert same(found, plain)


def test_drafts_change_no_token(folder: Path, plain: Sequence[Completion]) -> None:
    found, counts = run(folder, draft="ngram", draft_tokens=5)
    assert same(found, plain)
    assert 0 < counts.drafts.accepted < counts.drafts.drafted
    assert counts.decode_steps > 0


def test_a_forced_run_takes_a_step_for_many_tokens(folder: Path) -> None:
    text = "the ferry carries state across the river and back again; the ferryman waits for nobody."
    params = SamplingParams(max_tokens=200, seed=1, grammar=OutputGrammar.choice([text]))
    found = {}
    for draft in ("", "ngram"):
        options = {"dtype": "float64", "page_size": 16, "draft": draft, "draft_tokens": 7}
        with LLM(folder, prefix_cache=False, **options) as llm:
            (answer,) = llm.generate([PROMPT], params)
            found[draft] = (answer.token_ids, answer.text, answer.finish_reason)
            counts = llm.counts
    assert found["ngram"] == found[""]
    assert found["ngram"][1:] == (text, "stop")
    # The first token comes with the prompt, the end token is no draft.
    num_decoded = len(found["ngram"][0]) - 1
    assert counts.drafts.drafted == counts.drafts.accepted
    assert counts.decode_steps == -(-num_decoded // 8)


def test_drafts_of_a_model_change_no_token(
    folder: Path, plain: Sequence[Completion], tmp_path: Path
) -> None:
    other = save_guided_model(tmp_path / "draft", seed=1)
    found, counts = run(folder, draft=str(other), draft_tokens=3)
    assert same(found, plain)
    assert counts.drafts.drafted > 0


def test_two_ranks_change_no_token(folder: Path, plain: Sequence[Completion]) -> None:
    """Rank 0 draws under the mask, with forced runs as drafts; the other rank reads its tokens."""
    found, counts = run(folder, tp_size=2, draft="ngram", draft_tokens=5)
    assert same(found, plain)
    assert counts.drafts.accepted > 0


def test_retraction_changes_no_token(folder: Path, plain: Sequence[Completion]) -> None:
    found, counts = run(folder, memory_bytes=1_220_000, max_running=4)
    assert counts.retractions > 0
    assert same(found, plain)


def test_the_offline_engine_says_what_a_schema_does_not_hold(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    schema = {"type": "string", "format": "color", "maxLength": 4}
    either = OutputGrammar.either([OutputGrammar.json_schema(schema), OutputGrammar.choice(["x"])])
    params = SamplingParams(max_tokens=30, temperature=1.0, grammar=either)
    with LLM(folder, **PLAIN) as llm:
        answers = llm.generate([PROMPT] * 4, params)
        with pytest.raises(InvalidRequest, match=r"maximum is beyond 2\^53"):
            OutputGrammar.json_schema({"type": "integer", "maximum": 2**63})
    assert all(re.fullmatch('x|"[^"]*"', answer.text) for answer in answers)
    messages = [
        record.getMessage() for record in caplog.records if "holds nothing" in record.message
    ]
    assert messages == ["format of the schema holds nothing: format color is not known"]
