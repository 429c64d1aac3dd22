"""A model that drafts with its own layer: plain decoding's tokens, and the published formula's
drafts.

The drafts show whether the layer's state is right, because a wrong draft changes no token. They are
compared cold, resumed from the device and from the host, behind a retraction, and on two ranks.
FERRYMAN_TEST_RANKS has every family run on two ranks.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.host_fed import Cell, engine
from tests.engine.test_draft_decoding import a_prompt, a_way_to_sample, assert_same, least_memory
from tests.engine.test_draft_decoding import run as run_all
from tests.engine.watched_drafts import WatchedDrafts
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.mtp_checkpoint import CASES, WEIGHTS, MtpFormula, save_with_mtp
from tests.tiny_models import save_tiny_model

from ferryman.errors import ConfigError
from ferryman.llm import LLM
from ferryman.schedule.request import SamplingParams

PROMPT = [(7 * i * i + 3 * i) % (VOCAB_SIZE - 3) + 3 for i in range(120)]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, logprobs=2, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=17, temperature=0.8, seed=4, ignore_eos=True)
ON_RANKS = tuple(CASES) if "FERRYMAN_TEST_RANKS" in os.environ else ("qwen3_next",)


@pytest.fixture(scope="module", params=CASES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_mtp(tmp_path_factory.mktemp(family), family)


@pytest.fixture(scope="module")
def formula(folder: Path, family: str) -> MtpFormula:
    return MtpFormula(folder, family)


def test_drafts_are_those_of_the_published_formula(
    folder: Path, formula: MtpFormula, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cold and of different lengths at once, then again and forked behind cached pages."""
    both = [(PROMPT[:20], GREEDY), (PROMPT[:77], DRAWN)]
    fork = [([*PROMPT[:66], 5], GREEDY)]
    plain, _, _ = run_all(folder, both + fork)
    with LLM(
        folder,
        dtype="float64",
        page_size=8,
        chunk_tokens=32,
        max_running=4,
        memory_bytes=1 << 23,
        snapshot_grid=16,
        draft="mtp",
        draft_tokens=5,
    ) as llm:
        watch = WatchedDrafts(monkeypatch, random.Random(1))
        for asked, expected in ((both, plain[:2]), (both, plain[:2]), (fork, plain[2:])):
            drawn = [answer.token_ids for answer in expected]
            watch.expect([(p, more) for (p, _), more in zip(asked, drawn, strict=True)])
            found = llm.generate([prompt for prompt, _ in asked], [how for _, how in asked])
            assert_same(found, expected)
            watch.check(formula)
        assert found[0].cached_tokens["device"] == 64
        counts = llm.counts.drafts
        assert 0 < counts.accepted < counts.drafted
        llm.check_integrity()


def test_its_drafts_change_no_token(folder: Path, family: str) -> None:
    rng = random.Random(f"mtp {family}")
    asked = [(a_prompt(rng, 6), a_way_to_sample(rng)) for _ in range(8)]
    overlap = rng.random() < 0.5
    plain, _, _ = run_all(folder, asked)
    found, counts, _ = run_all(
        folder, asked, draft="mtp", draft_tokens=rng.randint(1, 6), overlap=overlap
    )
    assert_same(found, plain)
    assert counts.drafted > 20


def test_without_a_prefix_cache_too(folder: Path) -> None:
    asked = [(PROMPT[:30], GREEDY), (PROMPT[:1], GREEDY)]
    plain, _, _ = run_all(folder, asked)
    found, counts, _ = run_all(folder, asked, draft="mtp", prefix_cache=False)
    assert_same(found, plain)
    assert counts.drafted > 20


def test_retracted_requests_go_on_with_the_layers_state(
    folder: Path, formula: MtpFormula, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=28, temperature=0.0, ignore_eos=True)
    asked = [(PROMPT[:length], params) for length in (1, 30, 60)]
    plain, _, _ = run_all(folder, asked)
    watch = WatchedDrafts(monkeypatch, random.Random(2))
    watch.expect([(p, a.token_ids) for (p, _), a in zip(asked, plain, strict=True)])
    memory = least_memory(folder, "mtp")
    found, _, retractions = run_all(folder, asked, draft="mtp", memory_bytes=memory + 4096)
    assert retractions > 0, "the pools were meant to run out"
    assert_same(found, plain)
    watch.check(formula)


def test_the_layers_state_is_loaded_from_the_host(
    folder: Path, formula: MtpFormula, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = PROMPT[:75]
    with engine(folder, Cell(32, overlap=True, draft="mtp")) as llm:
        watch = WatchedDrafts(monkeypatch, random.Random(3))
        with engine(folder, Cell(1024, overlap=False)) as alone:
            plain = alone.generate([prompt], GREEDY)
        for origin in ("cold", "host"):
            watch.expect([(prompt, plain[0].token_ids)])
            found = llm.generate([prompt], GREEDY)
            assert_same(found, plain)
            watch.check(formula)
            assert found[0].cached_tokens["host"] == (64 if origin == "host" else 0)
            llm.write_through(prompt)
            llm.forget()


@pytest.mark.parametrize("on_ranks", ON_RANKS)
def test_two_ranks_draft_as_one(
    on_ranks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is watched; what it proposes is computed with the other's share of the layer."""
    folder = save_with_mtp(tmp_path, on_ranks, num_ranks=2)
    prompt = PROMPT[:75]
    with engine(folder, Cell(1024, overlap=False)) as alone:
        plain = alone.generate([prompt], GREEDY)
    with engine(folder, Cell(32, overlap=True, draft="mtp", tp_size=2)) as llm:
        watch = WatchedDrafts(monkeypatch)
        for cached in (0, 64):
            watch.expect([(prompt, plain[0].token_ids)])
            found = llm.generate([prompt], GREEDY)
            assert_same(found, plain)
            assert found[0].cached_tokens["device"] == cached
            watch.check(MtpFormula(folder, on_ranks))


def test_a_layer_without_numbers_changes_no_token(folder: Path, tmp_path: Path) -> None:
    """Its keys, values and drafts are NaN; pages with them are reused, and go to other requests."""
    weights = load_file(folder / WEIGHTS)
    for name, tensor in weights.items():
        if name.endswith(("mtp.fc.weight", "eh_proj.weight")):
            tensor.fill_(torch.nan)
    save_file(weights, tmp_path / WEIGHTS, metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    asked = [(PROMPT[:length], GREEDY) for length in (20, 75, 75, 50)]
    plain, _, _ = run_all(tmp_path, asked)
    found, counts, _ = run_all(tmp_path, asked, draft="mtp")
    assert_same(found, plain)
    assert counts.drafted > 20


# Refused.


def test_a_checkpoint_without_the_layers_tensors_is_refused(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", WEIGHTS):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    parts = ("fc.weight", "eh_proj.weight")
    kept = {k: v for k, v in load_file(tmp_path / WEIGHTS).items() if not k.endswith(parts)}
    save_file(kept, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"(fc|eh_proj)\.weight' is missing from"):
        run_all(tmp_path, [], draft="mtp")


def test_a_config_that_counts_no_such_layer_is_refused(
    folder: Path, family: str, tmp_path: Path
) -> None:
    counts = {"qwen3_5": "mtp_num_hidden_layers"}
    name = counts.get(family, "num_nextn_predict_layers")
    (tmp_path / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes())
    config = json.loads((folder / "config.json").read_text())
    for number in (0, 2):
        (tmp_path / "config.json").write_text(json.dumps({**config, name: number}))
        with pytest.raises(ConfigError, match=f"'{name}' must be 1 for --draft mtp; it is"):
            run_all(tmp_path, [], draft="mtp")


def test_a_family_without_such_layers_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "granite_nope")
    with pytest.raises(ConfigError, match="--draft mtp needs a model with a layer for multi-token"):
        run_all(folder, [], draft="mtp")
