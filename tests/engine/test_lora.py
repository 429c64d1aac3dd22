"""LoRA adapters beside the weights: the answers of the merged model, in any batch, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.engine.host_fed import PAGE_SIZE, Cell, HostFed, assert_same, engine
from tests.lora_folders import RandomAdapter, save_adapter
from tests.model.comparison import random_config
from tests.model.families.shapes import VOCAB_SIZE
from tests.tiny_models import save_random, save_tiny_model

from ferryman.cache.keys import as_token_ids, page_keys, root_key
from ferryman.errors import ConfigError, UnknownModel
from ferryman.llm import LLM, Completion
from ferryman.schedule.request import SamplingParams

PROMPT = [(7 * i * i + 3 * i) % (VOCAB_SIZE - 3) + 3 for i in range(75)]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, logprobs=5, ignore_eos=True)
COLD = Cell(1024, overlap=False, prefix_cache=False)
NAMES = ("", "one", "two")


@dataclass(frozen=True)
class Adapted:
    """A model, two adapters of it, and the answer of each merged model by the adapter's name."""

    folder: Path
    adapters: dict[str, RandomAdapter]
    merged: dict[str, Completion]

    def llm(self, chunk_tokens: int = 32, **options: object) -> HostFed:
        lora = {name: adapter.folder for name, adapter in self.adapters.items()}
        return HostFed(
            self.folder,
            dtype="float64",
            page_size=PAGE_SIZE,
            chunk_tokens=chunk_tokens,
            max_running=6,
            memory_bytes=64 << 20,
            lora=lora,
            **options,
        )


def _save_base(folder: Path, name: str) -> Path:
    """Attention and an MLP in each layer, or Mamba-2 beside attention."""
    if name == "llama":
        return save_random(folder, random_config("llama", 0), 0)
    return save_tiny_model(folder, name)


@pytest.fixture(scope="module", params=["llama", "granite_nope"])
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    path = tmp_path_factory.mktemp(request.param)
    base = _save_base(path / "base", request.param)
    adapters = {
        "one": save_adapter(base, path / "one", seed=1),
        "two": save_adapter(
            base, path / "two", seed=2, rank=2, words=("q_proj", "in_proj"), use_rslora=True
        ),
    }
    folders = {"": base}
    for name, adapter in adapters.items():
        folders[name] = adapter.merged(path / f"merged-{name}")
    merged = {}
    for name, folder in folders.items():
        with engine(folder, COLD) as llm:
            merged[name] = llm.generate([PROMPT], GREEDY)[0]
    assert len({found.token_ids for found in merged.values()}) == 3, "the adapters tell"
    return Adapted(base, adapters, merged)


def test_a_mixed_batch_answers_as_the_merged_models(adapted: Adapted) -> None:
    with adapted.llm(prefix_cache=False) as llm:
        names = ["one", "", "two", "one", ""]
        found = llm.generate([PROMPT] * len(names), GREEDY, adapter=names)
        for name, answer in zip(names, found, strict=True):
            assert_same(answer, adapted.merged[name])


def test_no_state_is_reused_across_adapters(adapted: Adapted) -> None:
    """Nor of the base by an adapter; of its own, each reuses what it can."""
    with adapted.llm() as llm:
        for name in NAMES:
            (first,) = llm.generate([PROMPT], GREEDY, adapter=name)
            assert first.cached_tokens["device"] == 0
            assert_same(first, adapted.merged[name])
        for name in reversed(NAMES):
            (again,) = llm.generate([PROMPT], GREEDY, adapter=name)
            assert again.cached_tokens["device"] == 64
            assert_same(again, adapted.merged[name])
        llm.check_integrity()


def test_a_conversation_goes_on_from_the_state_of_its_own_adapter(adapted: Adapted) -> None:
    """The pages that decoding filled have the adapter's keys, too."""
    with adapted.llm() as llm:
        turns = {}
        for name in NAMES:
            (first,) = llm.generate([PROMPT], GREEDY, adapter=name)
            turns[name] = [*PROMPT, *first.token_ids]
        assert len({tuple(turn) for turn in turns.values()}) == 3
        for name, turn in turns.items():
            (found,) = llm.generate([[*turn, 5]], GREEDY, adapter=name)
            assert found.cached_tokens["device"] == 80
        (other,) = llm.generate([[*turns["one"], 5]], GREEDY, adapter="two")
        assert other.cached_tokens["device"] == 64, "the prompt alone"


def test_the_first_page_that_decoding_fills_has_the_adapters_key(adapted: Adapted) -> None:
    """The prompt is shorter than a page, so its keys say nothing of the adapter yet."""
    with adapted.llm() as llm:
        longer = replace(GREEDY, max_tokens=30)
        (first,) = llm.generate([PROMPT[:5]], longer, adapter="one")
        turn = [*PROMPT[:5], *first.token_ids]
        for name, least in (("", 0), ("two", 0), ("one", PAGE_SIZE)):
            (found,) = llm.generate([turn], GREEDY, adapter=name)
            assert bool(found.cached_tokens["device"]) is bool(least), name


def test_the_host_tier_gives_an_adapter_its_own_state_only(adapted: Adapted) -> None:
    with adapted.llm() as llm:
        scheduler, adapters = llm._engine.scheduler, llm._engine.adapters
        manifest = scheduler.manifest
        llm.generate([PROMPT], GREEDY, adapter="one")
        root = root_key(manifest, adapter=adapters["one"].digest)
        llm.copy(scheduler.chain_units(page_keys(root, as_token_ids(PROMPT), PAGE_SIZE)))
        for name, loaded in (("one", 64), ("two", 0), ("", 0)):
            llm.forget()
            (found,) = llm.generate([PROMPT], GREEDY, adapter=name)
            assert found.cached_tokens["host"] == loaded
            assert_same(found, adapted.merged[name])


def test_drafts_are_verified_with_the_adapter(adapted: Adapted) -> None:
    repeated = PROMPT[:20] * 3
    with adapted.llm() as llm:
        plain = [llm.generate([repeated], GREEDY, adapter=name)[0] for name in NAMES]
    with adapted.llm(draft="ngram") as llm:
        for name, expected in zip(NAMES, plain, strict=True):
            assert_same(llm.generate([repeated], GREEDY, adapter=name)[0], expected)


def test_an_unknown_adapter_is_refused_with_the_nearest_name(adapted: Adapted) -> None:
    with adapted.llm() as llm, pytest.raises(UnknownModel, match="did you mean one"):
        llm.generate([PROMPT], GREEDY, adapter="onee")


def test_adapters_are_refused_with_what_they_do_not_go_with(adapted: Adapted) -> None:
    lora = {"one": adapted.adapters["one"].folder}
    with pytest.raises(ConfigError, match="not divided among ranks"):
        LLM(adapted.folder, lora=lora, tp_size=2)
    with pytest.raises(ConfigError, match="ngram is supported"):
        LLM(adapted.folder, lora=lora, draft=str(adapted.folder))
    with pytest.raises(ConfigError, match="no adapter_config"):
        LLM(adapted.folder, lora={"one": adapted.folder})
