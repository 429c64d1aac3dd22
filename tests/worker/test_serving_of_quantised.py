"""A checkpoint of every quantised format is served, handed off and resumed as its twin's numbers.

The twin holds in floats the numbers that the codes stand for. Between the two, float64 agrees to
1e-12; what is resumed is compared in bfloat16, where torch has products of its own for some
formats, and to the bit: its steps have the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.host_fed import Cell, HostFed, engine
from tests.harness.pair import check, hand_off, pair_on, pair_with, request_of, worker_options
from tests.mxfp4_folders import save_mxfp4
from tests.native import native_config, save_native
from tests.quantised_folders import RECIPES, save_int8_twin, save_quantised
from tests.tool_recipes import TOOL_RECIPES

from ferryman.errors import ManifestMismatch
from ferryman.llm import Completion
from ferryman.schedule.request import SamplingParams

PROMPT = [(7 * i * i + 3 * i) % 58 + 3 for i in range(75)]
FORK = [*PROMPT[:66], 5]
PAGE_END = 64
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, logprobs=5, ignore_eos=True)
INT8 = "int8 at load"
COLD = Cell(1024, overlap=False, prefix_cache=False)
# Cold, the prompt is cut where it is resumed.
CUT = Cell(PAGE_END, overlap=False, dtype="bfloat16")
CONFIG = native_config(["full_attention", "sliding_attention+mamba", "linear_attention"])


@dataclass(frozen=True, slots=True)
class QuantisedFolders:
    """A model in a format, the option that makes it so, and its twin."""

    folder: Path
    twin: Path
    quantize: str = "none"


def by_recipe(name: str) -> Callable[[Path], QuantisedFolders]:
    recipe = {**RECIPES, **TOOL_RECIPES}[name]

    def save(path: Path) -> QuantisedFolders:
        twin = save_native(path / "twin", CONFIG)
        return QuantisedFolders(save_quantised(twin, path / "quantised", recipe), twin)

    return save


def in_mxfp4(path: Path) -> QuantisedFolders:
    torch.manual_seed(5)
    twin, folder = save_mxfp4(path)
    return QuantisedFolders(folder, twin)


def as_int8(path: Path) -> QuantisedFolders:
    plain = save_native(path / "plain", CONFIG)
    return QuantisedFolders(plain, save_int8_twin(plain, path / "twin"), "int8")


NAMES = (
    "fp8 by block",
    "fbgemm fp8",
    "compressed fp8 by tensor",
    "compressed fp8 by row",
    "compressed int8",
    "packed int4",
    "gptq int4, zeros and order",
    "awq",
    "modelopt nvfp4, smoothed",
    "modelopt, mixed",
    "compressed nvfp4",
    "bitsandbytes nf4, nested",
    "bitsandbytes int8",
)
FORMATS: dict[str, Callable[[Path], QuantisedFolders]] = {
    **{name: by_recipe(name) for name in NAMES},
    "mxfp4": in_mxfp4,
    INT8: as_int8,
}


@pytest.fixture(scope="module")
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> QuantisedFolders:
    return FORMATS[request.param](tmp_path_factory.mktemp("model"))


every_format = pytest.mark.parametrize("saved", FORMATS, indirect=True)


@every_format
async def test_a_quantised_model_is_handed_off_and_answers_as_its_twin(
    saved: QuantisedFolders,
) -> None:
    with engine(saved.twin, COLD) as llm:
        cold = llm.generate([PROMPT, FORK], GREEDY)
    ranks = (1, 1) if saved.quantize == "none" else (1, 2)  # a rank quantises its own part
    async with pair_on(saved.folder, "grpc", ranks, quantize=saved.quantize) as pair:
        for name, prompt, right in (("first", PROMPT, 0), ("again", PROMPT, 0), ("fork", FORK, 1)):
            await hand_off(pair, name, prompt, GREEDY)
            await check(pair, name, cold[right])


@every_format
def test_a_quantised_model_resumes_to_the_bit(saved: QuantisedFolders) -> None:
    with engine(saved.folder, replace(CUT, quantize=saved.quantize)) as llm:
        cold = answer(llm)
        assert not any(cold.cached_tokens.values())
        for tier in ("device", "host"):
            found = answer(llm)
            assert found.cached_tokens[tier] == PAGE_END
            assert (found.token_ids, found.logprobs) == (cold.token_ids, cold.logprobs)
            llm.write_through(PROMPT)
            llm.forget()
        llm.check_integrity()


def answer(llm: HostFed) -> Completion:
    return llm.generate([PROMPT], GREEDY)[0]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return save_native(tmp_path, native_config(["full_attention"]))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        pytest.param({"quantize": "int8"}, "fingerprint: .* here, .* there", id="weights"),
        pytest.param(
            {"kv_dtype": "fp8"}, "dtype float64 here, float8_e4m3fn there", id="pages of keys"
        ),
    ],
)
async def test_workers_of_which_one_quantises_refuse_each_other(
    plain: Path, option: dict[str, Any], words: str
) -> None:
    prefills = worker_options(plain, decodes=False, **option)
    async with pair_with(prefills, worker_options(plain), "grpc") as pair:
        with pytest.raises(ManifestMismatch, match=r"digest: .* here, .* there"):
            await hand_off(pair, "by-prefill", PROMPT, GREEDY)
        prefills_own = pair.prefill.engine.manifest
        theirs = replace(
            pair.wish(request_of(pair, "by-decode", PROMPT, GREEDY)),
            manifest_digest=prefills_own.digest,
            manifest_json=prefills_own.text,
        )
        with pytest.raises(ManifestMismatch, match=words):
            await pair.reserve(theirs)
        assert not pair.leased()
