"""A quantised model is the model of the numbers its codes stand for: logits, ranks, fingerprint."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.lockstep import Lockstep
from tests.model.comparison import BY_NAME, random_config
from tests.model.differences import difference
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.paged_run import PagedRun
from tests.model.ragged import ragged_logits, random_prompt
from tests.native import native_config, save_native
from tests.quantised_folders import (
    LINEAR,
    Recipe,
    compressed,
    fp8_by_block,
    is_quantised,
    save_int8_twin,
    save_quantised,
)
from tests.quantised_folders import RECIPES as LINEAR_RECIPES
from tests.tiny_models import save_random
from tests.tool_recipes import TOOL_RECIPES, bitsandbytes, modelopt
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.model.config import load_format
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model, model_fingerprint
from ferryman.model.shapes.ranks import SINGLE_RANK, Group
from ferryman.model.weights.load_progress import LoadProgress

FAMILIES = (
    "llama",
    "qwen3_next",
    "deepseek_v32",
    "falcon_h1",
    "nemotron_h",
    "granite",
    "gemma3n",
)
"""With biases, experts, delta nets, latents, an index, multipliers by row and by column, and Mamba
between them."""

RECIPES = {**LINEAR_RECIPES, **TOOL_RECIPES}

every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def save_family(folder: Path, family: str, seed: int = 1) -> Path:
    architectures = BY_NAME[family].architectures
    config = random_config(family, seed)
    config.architectures = list(architectures[:1])
    return save_random(folder, config, seed)


def logits(
    folder: Path, dtype: str = "float64", quantize: str = "none", group: Group = SINGLE_RANK
) -> list[Tensor]:
    """Logits of two prompts in random chunks and step by step."""
    rng = random.Random(4)
    prompts = [random_prompt(rng, length, VOCAB_SIZE) for length in (17, 45)]
    model = load_model(folder, LoadOptions(dtype, page_size=8, quantize=quantize, group=group))
    return ragged_logits(PagedRun(model, 4), prompts, rng)


def assert_equal(found: list[Tensor], right: list[Tensor], tolerance: float = 1e-12) -> None:
    for one, other in zip(found, right, strict=True):
        assert float(other.std()) > 0.01
        assert difference(one, other) < tolerance


@pytest.mark.parametrize(
    ("family", "name"),
    [(family, name) for i, family in enumerate(FAMILIES) for name in list(RECIPES)[i % 3 :: 3]],
)
def test_a_quantised_model_is_the_model_of_its_numbers(
    family: str, name: str, tmp_path: Path
) -> None:
    """A third of the formats for each family; the next test takes all of them."""
    recipe = RECIPES[name]
    twin = save_quantisable(tmp_path, family, recipe)
    folder = save_quantised(twin, tmp_path / "quantised", recipe)
    assert_equal(logits(folder), logits(twin))


def save_quantisable(folder: Path, family: str, recipe: Recipe) -> Path:
    """The first random model of the family with a weight whose dims suit the format."""
    for seed in itertools.count(1):
        found = save_family(folder / str(seed), family, seed)
        tensors = load_file(found / "model.safetensors")
        if any(is_quantised(name, weight, recipe) for name, weight in tensors.items()):
            return found
    raise AssertionError("no config has dims that suit")


@every_recipe
def test_a_quantised_model_with_all_kinds_of_state_is_the_model_of_its_numbers(
    recipe: Recipe, tmp_path: Path
) -> None:
    twin = save_native(tmp_path / "twin", native_config())
    folder = save_quantised(twin, tmp_path / "quantised", recipe)
    right = logits(twin)
    assert_equal(logits(folder), right)
    assert_equal(logits(folder, "float32"), right, 1e-4)


@every_recipe
def test_two_ranks_of_a_quantised_model_compute_what_one_does(
    recipe: Recipe, tmp_path: Path
) -> None:
    twin = save_native(tmp_path / "twin", native_config())
    folder = save_quantised(twin, tmp_path / "quantised", recipe)
    ranks = Lockstep(2).run(lambda group: logits(folder, group=group))
    assert_equal(ranks[0], logits(twin), 1e-11)


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss"])
def test_int8_at_load_is_the_model_of_its_numbers(family: str, tmp_path: Path) -> None:
    plain = save_family(tmp_path / "plain", family)
    twin = save_int8_twin(plain, tmp_path / "twin", transposed=family == "gpt_oss")
    right = logits(twin)
    assert_equal(logits(plain, quantize="int8"), right)
    assert difference(logits(plain)[0], right[0]) > 1e-5, "the codes are not the weights"


def test_two_ranks_quantise_what_one_does(tmp_path: Path) -> None:
    """A row's scale is that of the undivided row, however its columns are cut."""
    plain = save_native(tmp_path / "plain", native_config())
    twin = save_int8_twin(plain, tmp_path / "twin")
    ranks = Lockstep(2).run(lambda group: logits(plain, quantize="int8", group=group))
    assert_equal(ranks[0], logits(twin), 1e-11)


def test_a_fingerprint_covers_the_format(tmp_path: Path) -> None:
    """Of the same bytes: other fields of the format are other numbers."""
    twin = save_native(tmp_path / "twin", native_config())
    folder = save_quantised(twin, tmp_path / "quantised", RECIPES["fp8 by block"])
    before = model_fingerprint(folder, "float32")
    assert model_fingerprint(twin, "float32") != before
    assert model_fingerprint(twin, "float32") != model_fingerprint(twin, "float32", "int8")
    assert load_model(twin, LoadOptions("float32", quantize="int8")).manifest.fingerprint == (
        model_fingerprint(twin, "float32", "int8")
    )
    edit(folder, lambda found: found.update(weight_block_size=[24, 16]))
    assert model_fingerprint(folder, "float32") != before


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the `quantization_config` of the model in `folder`."""
    raw = json.loads((folder / "config.json").read_text())
    change(raw["quantization_config"])
    (folder / "config.json").write_text(json.dumps(raw))


def memory(value: object) -> int:
    """The bytes of all tensors within a model."""
    if isinstance(value, Tensor):
        return value.untyped_storage().nbytes()
    if isinstance(value, tuple | list):
        return sum(map(memory, value))
    if is_dataclass(value):
        return sum(memory(getattr(value, field.name)) for field in fields(value))
    return 0


WIDE = {
    "fp8 by tensor": RECIPES["fp8 by tensor"],
    "fp8 by block": Recipe(
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        partial(fp8_by_block, rows=128, columns=128),
    ),
}
KEPT = {
    **WIDE,
    **{name: TOOL_RECIPES[name] for name in ("modelopt nvfp4", "bitsandbytes nf4, nested")},
}
LARGE = native_config(["full_attention"], hidden_size=256, intermediate_size=1024, vocab_size=64)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("fp8 by block", 8.7),
        ("fp8 by tensor", 8.4),
        ("int8", 8.4),
        ("modelopt nvfp4", 4.95),
        ("bitsandbytes nf4, nested", 4.95),
    ],
)
def test_codes_stay_codes_in_memory(name: str, bits: float, tmp_path: Path) -> None:
    """Bits for each weight of the linear layers; embedding, head and norms are in float32."""
    plain = save_native(tmp_path / "plain", LARGE)
    tensors = load_file(plain / "model.safetensors")
    num_codes = sum(t.numel() for n, t in tensors.items() if LINEAR.search(n))
    others = sum(4 * t.numel() for n, t in tensors.items() if not LINEAR.search(n))
    if name == "int8":
        found = memory(load_model(plain, LoadOptions("float32", quantize=name)))
    else:
        folder = save_quantised(plain, tmp_path / "quantised", KEPT[name])
        found = memory(load_model(folder, LoadOptions("float32")))
    assert 8 * (found - others) / num_codes < bits


SPOILT = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        pytest.param(lambda t: t.pop(f"{SPOILT}_scale_inv"), [f"{SPOILT}_scale"], id="no scale"),
        pytest.param(
            lambda t: t.update({SPOILT: t[SPOILT][:-1].clone()}), [SPOILT, "[47, 64]"], id="shape"
        ),
        pytest.param(
            lambda t: t.update({f"{SPOILT}_scale_inv": torch.ones(1, 1)}),
            [f"{SPOILT}_scale_inv", "[1, 1]", "[3, 3]"],
            id="shape of scales",
        ),
        pytest.param(
            lambda t: t[SPOILT].view(torch.uint8)[3, 5].fill_(0xFF),
            [SPOILT, "not-a-number"],
            id="not a number",
        ),
    ],
)
def test_spoilt_codes_are_refused_by_tensor(
    spoil: Callable[[dict[str, Tensor]], object], named: list[str], tmp_path: Path
) -> None:
    twin = save_native(tmp_path / "twin", native_config())
    folder = save_quantised(twin, tmp_path / "quantised", RECIPES["fp8 by block"])
    tensors = load_file(folder / "model.safetensors")
    assert tensors[SPOILT].dtype is torch.float8_e4m3fn
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError) as refusal:
        load_model(folder, LoadOptions("float32"))
    assert all(word in str(refusal.value) for word in named), refusal.value


@pytest.mark.parametrize(
    ("config", "named"),
    [
        pytest.param({"quant_method": "quanto"}, ["quanto", "fp8", "bitsandbytes"], id="method"),
        pytest.param({"quant_method": "fp8", "fmt": "e5m2"}, ["fmt", "e5m2"], id="exponent"),
        pytest.param(
            {"quant_method": "fp8", "weight_block_size": [128]}, ["weight_block_size"], id="block"
        ),
        pytest.param({"quant_method": "gptq", "bits": 3}, ["bits", "4 or 8"], id="three bits"),
        pytest.param(
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_marlin"},
            ["checkpoint_format", "gptq_v2"],
            id="layout of a kernel",
        ),
        pytest.param(
            {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down.*": {"bits": 8}}},
            ["dynamic"],
            id="other bits for some",
        ),
        pytest.param(
            {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"},
            ["version", "gemv"],
            id="layout of AWQ",
        ),
        pytest.param(
            compressed("nvfp4-pack-quantized", type="float"),
            ["num_bits", "4"],
            id="nvfp4 of 8 bits",
        ),
        pytest.param(
            compressed("nvfp4-pack-quantized", num_bits=4), ["type", "float"], id="nvfp4 of int"
        ),
        pytest.param(
            compressed("mxfp6-pack-quantized", type="float", num_bits=6),
            ["format", "mxfp6", "mxfp4-pack-quantized"],
            id="six bits",
        ),
        pytest.param(modelopt("NVFP4_SVD"), ["quant_algo", "NVFP4_SVD", "NVFP4_AWQ"], id="svd"),
        pytest.param(
            modelopt("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "W4A8_QSERVE"}}),
            ["quant_algo", "W4A8_QSERVE"],
            id="algorithm of a layer",
        ),
        pytest.param(modelopt("MIXED_PRECISION"), ["quantized_layers"], id="mixed, but no layers"),
        pytest.param(
            bitsandbytes(4, "af4"), ["bnb_4bit_quant_type", "nf4 or fp4"], id="another table"
        ),
        pytest.param(
            bitsandbytes(4, bnb_4bit_quant_storage="bfloat16"),
            ["bnb_4bit_quant_storage", "uint8"],
            id="bytes stored as numbers",
        ),
        pytest.param(bitsandbytes(2), ["load_in_4bit", "load_in_8bit"], id="no bits"),
        pytest.param(
            {**compressed("int-quantized"), "transform_config": {"config_groups": {"u": {}}}},
            ["transform_config"],
            id="rotated",
        ),
        pytest.param(
            {"quant_method": "gptq", "bits": 4, "dynamic": [8]}, ["dynamic"], id="rules in a list"
        ),
        pytest.param(
            {
                **compressed("int-quantized"),
                "config_groups": {"g": {"targets": ["re:["], "weights": {"num_bits": 8}}},
            },
            ["targets", "re:["],
            id="no pattern",
        ),
        pytest.param(
            compressed("float-quantized", type="float", num_bits=4), ["num_bits"], id="four floats"
        ),
        pytest.param(
            compressed("int-quantized", strategy="tensor_group"), ["strategy"], id="strategy"
        ),
        pytest.param(
            {**compressed("int-quantized"), "sparsity_config": {"format": "sparse-24"}},
            ["sparsity_config"],
            id="sparse",
        ),
    ],
)
def test_formats_that_are_not_known_are_refused_by_name(
    config: dict[str, Any], named: list[str], tmp_path: Path
) -> None:
    folder = save_native(tmp_path, {**native_config(), "quantization_config": config})
    with pytest.raises(ConfigError) as refusal:
        load_model(folder, LoadOptions("float32"))
    assert all(word in str(refusal.value) for word in named), refusal.value


NONSENSE: tuple[Any, ...] = ([], ["x"], {"x": 1}, "x", -1, 0, 1.5, True, None)


def with_nonsense(fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The fields with each value at any depth replaced by each kind of nonsense, or left out."""
    for name, value in fields.items():
        yield {other: each for other, each in fields.items() if other != name}
        yield from ({**fields, name: nonsense} for nonsense in NONSENSE)
        if isinstance(value, Mapping):
            yield from ({**fields, name: changed} for changed in with_nonsense(value))


@every_recipe
def test_nonsense_in_a_format_is_refused_or_does_not_count(recipe: Recipe, tmp_path: Path) -> None:
    num_refused = 0
    for found in with_nonsense(recipe.config):
        config = {**native_config(), "quantization_config": found}
        (tmp_path / "config.json").write_text(json.dumps(config))
        try:
            load_format(tmp_path)
        except ConfigError:
            num_refused += 1
    assert num_refused > 5


@pytest.mark.parametrize(
    ("device", "refusal"),
    [
        ("cuda:3", "device cuda:3: there is no such card here; there are cuda:0, cuda:1"),
        ("mps", "device mps is not supported; supported are cpu and cuda"),
        ("gpu", "device gpu is not supported; supported are cpu and cuda"),
    ],
)
@pytest.mark.parametrize("name", ["fp8 by block", "awq"])
def test_a_device_that_cannot_run_a_format_is_refused_before_a_weight_is_read(
    name: str, device: str, refusal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every format runs wherever a model runs, so it is the device that is refused."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    twin = save_native(tmp_path / "twin", native_config(["full_attention"]))
    folder = save_quantised(twin, tmp_path / "quantised", RECIPES[name])
    heard: list[LoadProgress] = []
    with pytest.raises(ConfigError, match=refusal):
        load_model(folder, LoadOptions("bfloat16", device=device, on_progress=heard.append))
    assert not heard


def test_what_is_quantised_already_is_not_quantised_again(tmp_path: Path) -> None:
    twin = save_native(tmp_path / "twin", native_config())
    folder = save_quantised(twin, tmp_path / "quantised", RECIPES["fp8 by block"])
    with pytest.raises(ConfigError, match="quantised already, as fp8; leave out quantize=int8"):
        load_model(folder, LoadOptions("float32", quantize="int8"))
    with pytest.raises(ConfigError, match="quantize='int3' is not supported; choose int8"):
        load_model(twin, LoadOptions("float32", quantize="int3"))
