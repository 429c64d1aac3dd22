"""Experts as a card multiplies them are the experts that a CPU calls one by one."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.model.comparison import random_config
from tests.model.differences import difference
from tests.model.paged_run import PagedRun
from tests.model.ragged import ragged_logits, random_prompt
from tests.mxfp4_folders import save_mxfp4
from tests.quantised_folders import RECIPES, Recipe, save_quantised
from tests.tiny_models import save_random
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.model.families import gpt_oss, nemotron_h
from ferryman.model.layers import experts, moe
from ferryman.model.layers.experts import (
    Activation,
    ExpertMatrices,
    GroupedExperts,
    RoutedExperts,
    ShareOfOutput,
    Weighing,
    grouped_experts,
)
from ferryman.model.layers.mlp import GatedActivation
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.weights.matrix import PlainMatrix
from ferryman.model.weights.quantisation.codes import ByteCodes
from ferryman.model.weights.quantisation.quantised_matrix import QuantisedMatrix, even_groups
from ferryman_kernels.products._grouped_product_triton import (
    grouped_codes_triton,
    grouped_floats_triton,
)
from ferryman_kernels.products.grouped_product import CodeStack, FloatStack

WITH_EXPERTS = (
    "deepseek_v2", "deepseek_v3", "dots1", "gemma4", "glm4_moe", "gpt_oss", "granite", "granite3",
    "jamba", "kimi_linear", "lfm2_moe", "ling_25", "llama4", "minimax", "mixtral", "nemotron_h",
    "qwen2_moe", "qwen3_moe", "qwen3_next",
)  # fmt: skip
CPU = torch.device("cpu")
LEAST_VOCAB = 61


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[GroupedExperts]:
    """Loads experts as for a card, and has those that were loaded."""
    found: list[GroupedExperts] = []

    def load(
        device: torch.device, parts: Iterable[ExpertMatrices], act: Activation, weighing: Weighing
    ) -> RoutedExperts:
        found.append(grouped_experts(list(parts), act, weighing))
        return found[-1]

    for module in (moe, gpt_oss, nemotron_h):
        monkeypatch.setattr(module, "load_experts_for", load)
    return found


def logits(folder: Path, dtype: str = "float64", seed: int = 3) -> list[Tensor]:
    rng = random.Random(seed)
    prompts = [random_prompt(rng, length, LEAST_VOCAB) for length in (11, 30)]
    model = load_model(folder, LoadOptions(dtype, page_size=8))
    return ragged_logits(PagedRun(model, seed), prompts, rng)


def with_experts(family: str, folder: Path) -> Path:
    """A random model of the family that has experts: some draws have none."""
    for seed in range(50):
        found = save_random(folder / str(seed), random_config(family, seed), seed)
        names = load_file(found / "model.safetensors")
        if any("expert" in name or "block_sparse_moe" in name for name in names):
            return found
    raise AssertionError(family)


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_grouped_experts_are_the_separate_ones(
    family: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = with_experts(family, tmp_path)
    right = logits(folder)
    made = request.getfixturevalue("made")
    for one, other in zip(logits(folder), right, strict=True):
        assert difference(one, other) < 1e-12
    assert made


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_grouped_experts_in_codes_are_the_separate_ones(
    recipe: Recipe, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    config = random_config("qwen3_moe", 1)
    config.update({"hidden_size": 32, "moe_intermediate_size": 32, "num_experts": 5})
    config.update({"decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts_per_tok": 2})
    config.architectures = ["Qwen3MoeForCausalLM"]
    twin = save_random(tmp_path / "twin", config, 1)
    folder = save_quantised(twin, tmp_path / "quantised", recipe)
    right = logits(folder)
    made = request.getfixturevalue("made")
    for one, other in zip(logits(folder), right, strict=True):
        assert difference(one, other) < 1e-12
    assert all(isinstance(each.down, CodeStack) for each in made)
    assert made


@pytest.mark.parametrize("is_mxfp4", [False, True], ids=["floats", "MXFP4"])
def test_a_model_of_experts_runs_in_triton(
    is_mxfp4: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[GroupedExperts]
) -> None:
    """Whole prompts through the kernels that a card would run."""
    plain, coded = save_mxfp4(tmp_path)
    right, calls = logits(plain), 0

    def product(x: Tensor, stack: FloatStack | CodeStack, order: Tensor, starts: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if isinstance(stack, FloatStack):
            return grouped_floats_triton(x, stack.weight, stack.bias, order, starts)
        coded = stack.codes, stack.meaning
        scaled = stack.scales, stack.zeros, stack.groups, stack.group_len
        return grouped_codes_triton(x, coded, scaled, stack.bias, order, starts)

    if torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no card")
    monkeypatch.setattr(experts, "grouped_product", product)
    made.clear()
    for one, other in zip(logits(coded if is_mxfp4 else plain), right, strict=True):
        assert difference(one, other) < 1e-12
    assert calls
    assert all(isinstance(each.down, CodeStack) == is_mxfp4 for each in made)


def test_experts_in_several_formats_are_refused_by_name() -> None:
    plain = PlainMatrix(torch.randn(8, 16), torch.float32, CPU)
    codes = ByteCodes(torch.ones(8, 16, dtype=torch.int8))
    coded = QuantisedMatrix(codes, torch.ones(8, 1), even_groups(16, 16), None, torch.float32, CPU)
    down = PlainMatrix(torch.randn(16, 4), torch.float32, CPU)
    with pytest.raises(ConfigError, match="several formats"):
        grouped_experts(
            [ExpertMatrices([plain], down), ExpertMatrices([coded], down)],
            GatedActivation(),
            ShareOfOutput(),
        )
    together = grouped_experts(
        [ExpertMatrices([plain, coded], down)], GatedActivation(), ShareOfOutput()
    )
    assert [type(stack) for stack in together.first] == [FloatStack, CodeStack]


def test_a_card_gets_grouped_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's experts are asked for counts; the choice follows the device alone."""
    asked = list[int]()
    monkeypatch.setattr(
        experts, "grouped_experts", lambda parts, act, weighing: asked.append(len(parts))
    )
    matrix = PlainMatrix(torch.randn(8, 4), torch.float32, CPU)
    parts = [ExpertMatrices([matrix], PlainMatrix(torch.randn(4, 4), torch.float32, CPU))]
    for device in ("cpu", "cuda"):
        experts.load_experts_for(torch.device(device), parts, GatedActivation(), ShareOfOutput())
    assert asked == [1]
