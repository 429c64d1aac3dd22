"""Workers of unlike arithmetics: under `bits` no hand-off, under `values` one that is called so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.harness.pair import (
    hand_off,
    pair_of_workers,
    pair_with,
    request,
    request_of,
    worker_options,
)
from tests.tiny_models import save_tiny_model

from ferryman.cache.keys import page_keys, root_key
from ferryman.cache.manifest import Exactness
from ferryman.errors import ManifestMismatch
from ferryman.schedule.request import SamplingParams
from ferryman.settings.engine import EngineOptions
from ferryman_kernels.cpu.arithmetic import has_one_order

PROMPT = [(7 * i * i + 3 * i) % 120 + 3 for i in range(75)]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)

pytestmark = pytest.mark.skipif(
    not has_one_order(torch.float32), reason="bits are promised by compiled loops alone"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("gemma3"), "gemma3")


def options(folder: Path, tp_size: int, exactness: str, **more: bool) -> EngineOptions:
    chosen = worker_options(folder, tp_size=tp_size, **more)
    return chosen.model_copy(update={"dtype": "float32", "exactness": exactness})


async def test_under_bits_two_ranks_take_nothing_of_one_and_say_what_differs(
    folder: Path,
) -> None:
    prefills = options(folder, 1, "bits", decodes=False)
    async with pair_with(prefills, options(folder, 2, "auto")) as pair:
        here, there = pair.decode.engine.manifest, pair.prefill.engine.manifest
        assert {here.exactness, there.exactness} == {Exactness.BITS}
        words = f"arithmetic: {here.arithmetic} here, {there.arithmetic} there"
        keys = page_keys(root_key(there), request_of(pair, "r1", PROMPT, GREEDY).token_ids, 16)
        asked = replace(request_of(pair, "r1", PROMPT, GREEDY), keys=keys)
        order = replace(pair.order(asked), manifest_digest=there.digest)
        with pytest.raises(ManifestMismatch, match=words):
            await pair.run_prefill(order)
        assert not pair.leased()


async def test_under_values_they_hand_off_and_the_plan_says_values(folder: Path) -> None:
    prefills = options(folder, 1, "values", decodes=False)
    async with pair_with(prefills, options(folder, 2, "values")) as pair:
        assert pair.digest == pair.prefill.engine.manifest.digest
        await hand_off(pair, "r1", PROMPT, GREEDY)
        tokens, _ = await pair.read_tokens("r1")
        assert len(tokens) == GREEDY.max_tokens
        (planned,) = pair.prefill.facts("admitted")
        assert planned["exactness"] == "values"


async def test_the_plan_of_a_prompt_says_which_pages_have_another_arithmetic_alone() -> None:
    async with pair_of_workers() as pair:
        asked = request("r1", [1, 2, 3] * 8)
        order = replace(pair.order(asked), unlike_pages=3)
        await pair.run_prefill(order)
        (planned,) = pair.prefill.facts("admitted")
        uncached = planned["uncached"]
        assert isinstance(uncached, dict)
        assert uncached["other_arithmetic"] == 3
        assert set(uncached) == {"other_arithmetic", "never_seen"}
        assert planned["exactness"] == "values"
        await pair.read_tokens("r1")
