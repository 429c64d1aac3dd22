"""Log probabilities of a prompt's own tokens equal transformers', however it is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from tests.engine.host_fed import PAGE_SIZE, Cell, HostFed, engine
from tests.engine.test_equivalence_of_families import scarce_bytes
from tests.engine.test_non_finite import BROKEN, EMBEDDING, save_spoilt
from tests.lora_folders import save_adapter
from tests.model.mtp_checkpoint import save_with_mtp
from tests.oracle import load_oracle
from tests.tiny_models import save_tiny_model
from torch import Tensor

from ferryman.errors import InvalidRequest, NonFiniteLogits
from ferryman.llm import LLM, Completion
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.schedule.prompt_scores import MAX_ENTRIES
from ferryman.schedule.request import SamplingParams

PROMPT = [(7 * i * i + 3 * i) % 90 + 3 for i in range(75)]
FORK = [*PROMPT[:66], 5, 5, 5]
NUM_BEST = 3
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
SCORED = SamplingParams(
    max_tokens=4, temperature=0.0, ignore_eos=True, prompt_logprobs=NUM_BEST, logprobs=2
)
EXACT = 1e-12


@dataclass(frozen=True)
class Scorable:
    """A model, and transformers' log probabilities behind each token of a prompt."""

    folder: Path
    logs: dict[tuple[int, ...], Tensor]

    @classmethod
    def of(cls, folder: Path) -> Scorable:
        oracle = load_oracle(folder, torch.float64)
        prompts = [PROMPT, FORK, PROMPT[:1], PROMPT[:2]]
        logits = {tuple(prompt): oracle.logits(prompt) for prompt in prompts}
        return cls(folder, {p: torch.log_softmax(found, -1) for p, found in logits.items()})

    def check(self, found: Completion) -> None:
        prompt = found.prompt_token_ids
        first, *rest = found.prompt_logprobs
        assert first is None
        assert len(rest) == len(prompt) - 1
        for row, token, entry in zip(self.logs[prompt], prompt[1:], rest, strict=False):
            assert entry is not None
            likeliest = row.argsort(descending=True, stable=True).tolist()
            assert list(entry) == list(dict.fromkeys([token, *likeliest[:NUM_BEST]]))
            for token_id, (logprob, rank) in entry.items():
                assert logprob == pytest.approx(float(row[token_id]), abs=EXACT, rel=0)
                assert rank == 1 + likeliest.index(token_id)


@pytest.fixture(scope="module", params=["granite_moe", "bamba", "gemma3", "gpt_oss"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scorable:
    return Scorable.of(save_tiny_model(tmp_path_factory.mktemp(request.param), request.param))


@pytest.mark.parametrize("chunk_tokens", [16, 48, 1024])
def test_scores_are_those_of_one_forward(model: Scorable, chunk_tokens: int) -> None:
    """Chunks of several prompts end anywhere between their tokens; one prompt is one token long."""
    with engine(model.folder, Cell(chunk_tokens, overlap=chunk_tokens == 48)) as llm:
        prompts = [PROMPT, PROMPT[:1], FORK, PROMPT[:2]]
        (plain,) = llm.generate([PROMPT], GREEDY)
        assert plain.prompt_logprobs == ()
        found = llm.generate(prompts, SCORED)
        for one in found:
            model.check(one)
        assert found[0].token_ids == plain.token_ids
        llm.check_integrity()


def test_a_cached_prompt_is_computed_and_still_serves_others(model: Scorable) -> None:
    with engine(model.folder, Cell(32, overlap=False)) as llm:
        llm.generate([FORK], GREEDY)
        ((scored, plan),) = llm.arrive([PROMPT], SCORED)
        model.check(scored)
        assert (plan.position, plan.anchor_pages) == (0, 0)
        assert scored.cached_tokens["device"] == 0
        assert scored.uncached_reasons == {"prompt_logprobs": 5}
        (after,) = llm.generate([PROMPT], GREEDY)
        assert after.cached_tokens["device"] == 64
        assert after.token_ids == scored.token_ids
        llm.forget()
        llm.generate([PROMPT], SCORED)
        (after,) = llm.generate([PROMPT], GREEDY)
        assert after.cached_tokens["device"] == 64, "it has published its own pages"
        llm.check_integrity()


def test_a_request_that_was_retracted_has_told_its_scores(tmp_path: Path) -> None:
    model = Scorable.of(save_tiny_model(tmp_path, "bamba"))
    params = replace(SCORED, max_tokens=40)
    manifest = load_model(tmp_path, LoadOptions("float64", page_size=PAGE_SIZE)).manifest
    roomy = Cell(16, overlap=True, max_running=3, recurrent_slots=12)
    scarce = replace(roomy, memory_bytes=scarce_bytes(manifest, roomy))
    prompts = [PROMPT, FORK, PROMPT]
    with engine(tmp_path, roomy) as llm:
        expected = llm.generate(prompts, params)
    with engine(tmp_path, scarce) as llm:
        found = llm.generate(prompts, params)
        assert llm.counts.retractions > 0, "the pool was meant to run out"
        llm.check_integrity()
    for one, other in zip(found, expected, strict=True):
        model.check(one)
        assert one.token_ids == other.token_ids


def test_two_ranks_give_the_same_scores(tmp_path: Path) -> None:
    model = Scorable.of(save_tiny_model(tmp_path, "granite_moe"))
    with engine(tmp_path, Cell(48, overlap=True, tp_size=2)) as llm:
        for one in llm.generate([PROMPT, FORK, PROMPT[:1]], SCORED):
            model.check(one)


def test_drafts_change_no_score(tmp_path: Path) -> None:
    """By the model's own layer, by another model, and from the prompt's text."""
    target = save_with_mtp(tmp_path / "mtp", "qwen3_next")
    model = Scorable.of(target)
    for draft in ("mtp", str(target), "ngram"):
        with engine(target, Cell(32, overlap=True, draft=draft)) as llm:
            for one in llm.generate([PROMPT, FORK], SCORED):
                model.check(one)
            assert llm.counts.drafts.drafted > 0 or draft == "ngram"


def test_an_adapter_scores_as_the_merged_model(tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "base", "granite_nope")
    adapter = save_adapter(base, tmp_path / "one", seed=1)
    merged = Scorable.of(adapter.merged(tmp_path / "merged"))
    plain = Scorable.of(base)
    with HostFed(
        base,
        dtype="float64",
        page_size=PAGE_SIZE,
        chunk_tokens=32,
        memory_bytes=64 << 20,
        lora={"one": adapter.folder},
    ) as llm:
        one, none = llm.generate([PROMPT, PROMPT], SCORED, adapter=["one", ""])
    merged.check(one)
    plain.check(none)


def test_a_prompt_without_numbers_fails_and_is_not_cached(tmp_path: Path) -> None:
    save_spoilt(tmp_path, EMBEDDING, BROKEN)
    params = replace(SCORED, prompt_logprobs=0)
    spoilt = [*PROMPT[:40], BROKEN, *PROMPT[41:]]
    with engine(tmp_path, Cell(16, overlap=True)) as llm:
        with pytest.raises(NonFiniteLogits, match=r"behind position (3[2-9]|40) "):
            llm.generate([spoilt], params)
        (found,) = llm.generate([PROMPT], params)
        assert found.prompt_logprobs[1] is not None
        assert list(found.prompt_logprobs[1]) == [PROMPT[1]]
        llm.check_integrity()


def test_too_many_scores_are_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "granite_nope")
    for wrong in (-1, 21, True):
        with pytest.raises(InvalidRequest, match="prompt_logprobs"):
            SamplingParams(prompt_logprobs=wrong)
    with LLM(tmp_path, dtype="float32", page_size=16, memory_bytes=16 << 20) as llm:
        long = [5] * (MAX_ENTRIES // 21 + 1)
        with pytest.raises(InvalidRequest, match="at most 12483 tokens") as refused:
            llm.generate([long], SamplingParams(max_tokens=1, prompt_logprobs=20))
    assert refused.value.param == "prompt_logprobs"
