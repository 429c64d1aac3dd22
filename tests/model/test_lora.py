"""Adapters as files: what is refused and by which name, what the digest covers, what they take."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.lora_folders import RandomAdapter, save_adapter
from tests.memory.test_footprint import held, told
from tests.tiny_models import save_tiny_model

from ferryman.errors import ConfigError
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.weights.lora import adapter_names


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("base"), "granite_moe")


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> RandomAdapter:
    return save_adapter(base, tmp_path / "adapter", seed=1)


def change_config(folder: Path, **fields: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def options(adapter: RandomAdapter, dtype: str = "float32") -> LoadOptions:
    return LoadOptions(dtype, page_size=16, lora={"kites": adapter.folder})


REFUSED: dict[str, object] = {
    "use_dora": True,
    "bias": "all",
    "modules_to_save": ["lm_head"],
    "peft_type": "IA3",
    "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"q_proj": 2},
    "fan_in_fan_out": True,
    "init_lora_weights": "pissa",
    "layer_replication": [[0, 1]],
    "r": 0,
    "lora_alpha": "high",
    "some_new_field": 3,
}


@pytest.mark.parametrize("field", sorted(REFUSED))
def test_a_field_that_is_not_supported_is_refused_by_its_name(
    adapter: RandomAdapter, field: str
) -> None:
    change_config(adapter.folder, **{field: REFUSED[field]})
    with pytest.raises(ConfigError, match=rf"adapter_config\.json: {field}"):
        adapter_names({"kites": adapter.folder})


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.lm_head.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
        "base_model.model.model.layers.0.block_sparse_moe.experts.0.w1.lora_A.weight",
    ],
)
def test_a_tensor_that_is_no_part_of_a_linear_layer_is_refused_by_its_name(
    adapter: RandomAdapter, name: str
) -> None:
    change_tensors(adapter.folder, lambda tensors: tensors.update({name: torch.ones(4, 4)}))
    with pytest.raises(ConfigError, match=name):
        adapter_names({"kites": adapter.folder})


def test_an_adapter_of_another_model_is_refused(base: Path, adapter: RandomAdapter) -> None:
    layer = "base_model.model.model.layers.9.mamba.in_proj"

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{layer}.lora_A.weight"] = torch.ones(4, 8)
        tensors[f"{layer}.lora_B.weight"] = torch.ones(8, 4)

    change_tensors(adapter.folder, add)
    with pytest.raises(ConfigError, match="is of no linear layer that can be adapted"):
        load_model(base, options(adapter))


def test_an_adapter_of_other_widths_is_refused(base: Path, adapter: RandomAdapter) -> None:
    name = f"base_model.model.{min(adapter.parts)}.lora_A.weight"
    change_tensors(adapter.folder, lambda tensors: tensors.update({name: torch.ones(4, 3)}))
    with pytest.raises(ConfigError, match="do not fit its weight"):
        load_model(base, options(adapter))


def test_half_a_part_is_refused(base: Path, adapter: RandomAdapter) -> None:
    name = f"base_model.model.{min(adapter.parts)}.lora_B.weight"
    change_tensors(adapter.folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ConfigError, match=r"lora_B\.weight' is missing"):
        load_model(base, options(adapter))


def test_the_digest_is_of_the_numbers_and_the_scale(adapter: RandomAdapter) -> None:
    def digest() -> str:
        (named,) = adapter_names({"kites": adapter.folder})
        return named.digest

    first = digest()
    change_config(adapter.folder, task_type="CAUSAL_LM", lora_dropout=0.1)
    assert digest() == first, "neither changes an answer"
    change_config(adapter.folder, lora_alpha=7)
    other_scale = digest()
    change_config(adapter.folder, lora_alpha=8)
    assert digest() == first
    name = f"base_model.model.{min(adapter.parts)}.lora_A.weight"
    change_tensors(adapter.folder, lambda tensors: tensors[name].mul_(1.5))
    assert len({first, other_scale, digest()}) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_take_the_bytes_that_were_told(
    base: Path, adapter: RandomAdapter, dtype: str
) -> None:
    alone = LoadOptions(dtype, page_size=16)
    assert told(base, options(adapter, dtype)) > told(base, alone)
    assert held(base, options(adapter, dtype)) == told(base, options(adapter, dtype))
