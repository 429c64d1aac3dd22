"""Logits that are no finite numbers are no answer: at load, behind a prompt, behind a token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny_models import VOCAB_SIZE, save_tiny_model

from ferryman.errors import ConfigError, NonFiniteLogits, NonFiniteState
from ferryman.llm import LLM
from ferryman.model.sampling.inverse_cdf import NUM_LIKELIEST, Filters, draw
from ferryman.model.sampling.sampler import are_finite
from ferryman.schedule.request import SamplingParams

BROKEN = VOCAB_SIZE - 1
EMBEDDING = "model.embed_tokens.weight"
PROMPT = [(7 * i) % 120 + 3 for i in range(40)]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
WAYS = {
    "greedy": GREEDY,
    "drawn": SamplingParams(max_tokens=6, temperature=0.8, top_p=0.9, min_p=0.1, seed=3),
    "penalised": SamplingParams(
        max_tokens=6, temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5, seed=3
    ),
    "with logprobs": SamplingParams(max_tokens=6, temperature=0.0, logprobs=5),
}


def save_spoilt(folder: Path, name: str, rows: slice | int) -> Path:
    """A tiny model some of whose weights are NaN."""
    save_tiny_model(folder, "bamba")
    weights = load_file(folder / "model.safetensors")
    weights[name][rows] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Computes no numbers where the token BROKEN was read; its head is another matrix."""
    return save_spoilt(tmp_path_factory.mktemp("spoilt"), EMBEDDING, BROKEN)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, dtype="float32", page_size=16, memory_bytes=32 << 20) as llm:
        yield llm


@pytest.mark.parametrize("name", [EMBEDDING, "lm_head.weight", "model.layers.2.mamba.D"])
def test_a_model_that_gives_no_numbers_is_refused_at_load(name: str, tmp_path: Path) -> None:
    folder = save_spoilt(tmp_path, name, slice(None))
    with pytest.raises(ConfigError, match="no finite logits"):
        LLM(folder, dtype="float32", page_size=16, memory_bytes=32 << 20)


@pytest.mark.parametrize("how", WAYS)
def test_no_token_is_drawn_behind_a_prompt_that_gives_no_numbers(llm: LLM, how: str) -> None:
    (expected,) = llm.generate([PROMPT], WAYS[how])
    with pytest.raises(NonFiniteState, match="behind position 40"):  # it may be the state reused
        llm.generate([[*PROMPT, BROKEN]], WAYS[how])
    with pytest.raises(NonFiniteLogits, match="behind position 40"):  # nothing of it is reused
        llm.generate([[*PROMPT, BROKEN]], WAYS[how])
    (again,) = llm.generate([PROMPT], WAYS[how])
    assert again.token_ids == expected.token_ids
    assert len(again.token_ids) > 0
    llm.check_integrity()


@pytest.mark.parametrize("overlap", [False, True], ids=["one step at a time", "overlap"])
@pytest.mark.parametrize("draft", ["", "ngram"], ids=["plain", "drafts"])
def test_no_token_is_drawn_behind_a_token_that_gives_no_numbers(
    draft: str, overlap: bool, llm: LLM, tmp_path: Path
) -> None:
    """The first token is read by a decode step, which with overlap is on its way already."""
    prompt = [5, 6, 7, 8] * 10
    (whole,) = llm.generate([prompt], GREEDY)
    first = whole.token_ids[0]
    assert first not in prompt
    with LLM(
        save_spoilt(tmp_path, EMBEDDING, first),
        dtype="float32",
        page_size=16,
        memory_bytes=32 << 20,
        draft=draft,
        overlap=overlap,
    ) as spoilt:
        with pytest.raises(NonFiniteLogits, match="behind position 40"):
            spoilt.generate([prompt], GREEDY)
        spoilt.generate([prompt[:4]], SamplingParams(max_tokens=1))  # steps under way have ended
        spoilt.check_integrity()
        assert all(set(ledger.by_role) <= {"tree"} for ledger in spoilt.ledgers().values())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_one_number_that_is_none_spoils_its_row_and_no_other(value: float) -> None:
    logits = torch.arange(30.0).reshape(3, 10)
    logits[1, 4] = value
    assert are_finite(logits).tolist() == [True, False, True]


@pytest.mark.parametrize("vocab", [10, NUM_LIKELIEST + 44], ids=["sorted whole", "the likeliest"])
def test_a_draw_from_no_numbers_is_some_token_and_changes_no_other_row(vocab: int) -> None:
    """On a card an index out of range would end the whole process."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, vocab, generator=generator)
    some = torch.full((3,), 0.5, dtype=torch.float64)
    filters = Filters(torch.arange(3), some, some, torch.tensor([0, 5, 0]), some, some)
    expected = draw(logits, filters)
    logits[1] = torch.nan
    tokens = draw(logits, filters)
    assert (tokens >= 0).all()
    assert (tokens < vocab).all()
    assert tokens[[0, 2]].tolist() == expected[[0, 2]].tolist()
