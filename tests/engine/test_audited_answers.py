"""Answers of every kind are audited: sampled by any parameters, and by adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.engine.audited_engine import AuditedEngine, audited
from tests.lora_folders import save_adapter
from tests.tiny_models import save_tiny_model
from torch import Tensor

from ferryman.engine.forward.draw_tensors import DrawTensors
from ferryman.engine.forward.token_source import DrawnTokens, Sampler
from ferryman.schedule.events import AuditResult
from ferryman.schedule.request import SamplingParams
from ferryman.schedule.token_rules import TokenRules
from ferryman_kernels.products.packed_product import reads_panels

pytestmark = pytest.mark.skipif(
    not reads_panels(torch.bfloat16), reason="this processor's products follow the batch"
)
PROMPT = [(7 * i * i + 3 * i) % 80 + 3 for i in range(75)]
LENGTH = 40
SAMPLED = SamplingParams(max_tokens=LENGTH, temperature=0.9, seed=11, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
WAYS = {
    "plainly": SAMPLED,
    "by filters": replace(SAMPLED, top_k=20, top_p=0.8, min_p=0.02, temperature=1.7),
    "with penalties": replace(SAMPLED, repetition_penalty=1.3, presence_penalty=0.5),
    "greedily with penalties": replace(GREEDY, frequency_penalty=0.7),
    "by rules": replace(
        SAMPLED,
        rules=TokenRules(30, ((5, 4.0), (9, -8.0)), bad_words=((5, 5), (7,))),
        stop_token_ids=(5, 6),
        logprobs=3,
    ),
}
"""Each looks at a token's place, at the tokens before it, or at the whole vocabulary."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("bamba"), "bamba")


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AuditedEngine]:
    path = tmp_path_factory.mktemp("adapters")
    adapters = {name: path / name for name in ("boats", "kites")}
    for seed, adapter in enumerate(adapters.values()):
        save_adapter(folder, adapter, seed=seed)
    with audited(folder, "float32", lora=adapters) as made:
        yield made


def audits_of(
    engine: AuditedEngine, sampling: SamplingParams, adapter: str = "", *, share: float = 1.0
) -> dict[str, int]:
    """The results of audits of four requests at once that find their prompt's state."""
    engine.forget()
    engine.audit(0.0)
    engine.generate([PROMPT], GREEDY, adapter=adapter)
    engine.audit(share)
    engine.audits.results.clear()
    engine.audits.differences.clear()
    for number in range(3):
        prompts = [[*PROMPT, 3 + row] for row in range(number, 4)]
        engine.generate(prompts, replace(sampling, seed=number), adapter=adapter)
    return dict(engine.audits.results)


@pytest.mark.parametrize("way", WAYS)
def test_tokens_that_were_sampled_are_drawn_again(way: str, engine: AuditedEngine) -> None:
    results = audits_of(engine, WAYS[way])
    assert results.get(AuditResult.EQUAL, 0) >= 3
    assert not engine.audits.differences


@pytest.mark.parametrize("way", WAYS)
def test_a_token_that_was_drawn_from_other_logits_is_found(
    way: str, engine: AuditedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a wrong read in the last layer: no state shows it."""
    tokens = Sampler.tokens

    def shaken(source: Sampler, logits: Tensor, draws: DrawTensors, history: Tensor) -> DrawnTokens:
        if draws.count <= 4 and int(draws.positions.max()) > len(PROMPT) + 20:
            logits = logits.roll(1, dims=-1)
        return tokens(source, logits, draws, history)

    monkeypatch.setattr(Sampler, "tokens", shaken)
    assert audits_of(engine, WAYS[way]).get(AuditResult.DIFFERENT, 0) >= 3
    assert all(isinstance(found, int) for found in engine.audits.differences)
    assert min(engine.audits.differences) > len(PROMPT) + 20  # type: ignore[type-var,operator]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_answers_of_adapters_are_computed_again_by_their_adapter(
    sampling: SamplingParams, engine: AuditedEngine
) -> None:
    for adapter in ("kites", "boats", ""):
        results = audits_of(engine, sampling, adapter)
        assert results.get(AuditResult.EQUAL, 0) >= 3, adapter
        assert not engine.audits.differences
