"""Qwen3-Next and Qwen3.5 in their published forms."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model.differences import difference
from tests.model.families.qwen_hybrid import qwen3_5, qwen3_next
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.paged_run import PagedRun, Part
from tests.model.ragged import random_prompt
from tests.oracle import load_oracle
from tests.tiny_models import save_drawn, save_random
from torch import Tensor
from transformers import (
    PretrainedConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from ferryman.errors import ConfigError
from ferryman.model.config import load_config
from ferryman.model.families.qwen_hybrid import QwenHybridConfig
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.shapes.delta_shapes import DeltaShape
from ferryman.model.shapes.feed_forward_shapes import MixtureShape, MlpShape

PROMPT = random_prompt(random.Random(5), 50, VOCAB_SIZE)
VISION = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 1,
    "out_hidden_size": 40,
    "num_position_embeddings": 4,
}

RandomConfig = Callable[[random.Random], PretrainedConfig]


def logits(folder: Path) -> Tensor:
    run = PagedRun(load_model(folder, LoadOptions("float64", page_size=16)))
    (found,) = run.prefill([Part(run.start(), PROMPT)])
    return found


def seed_of(random_config: RandomConfig, wanted: Callable[[PretrainedConfig], bool]) -> int:
    """The first seed with a config that satisfies `wanted`."""
    return next(seed for seed in range(100) if wanted(random_config(random.Random(seed))))


@pytest.mark.parametrize(
    ("whole", "model"),
    [
        pytest.param(Qwen3_5Config, Qwen3_5ForConditionalGeneration, id="dense"),
        pytest.param(Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration, id="experts"),
    ],
)
def test_the_text_part_of_a_model_that_sees_is_served(
    whole: type[PretrainedConfig], model: Callable[[PretrainedConfig], Any], tmp_path: Path
) -> None:
    has_experts = whole is Qwen3_5MoeConfig
    seed = seed_of(qwen3_5, lambda text: hasattr(text, "num_experts") == has_experts)
    text = qwen3_5(random.Random(seed))
    config = whole(
        text_config=text.to_dict(),
        vision_config=VISION | {"out_hidden_size": text.hidden_size},
        tie_word_embeddings=text.tie_word_embeddings,
    )
    folder = save_drawn(tmp_path, model(config), seed)
    raw = json.loads((folder / "config.json").read_text())
    assert raw["architectures"] == [model.__name__]
    assert "layer_types" not in raw
    oracle = load_oracle(folder, torch.float64)
    assert difference(logits(folder), oracle.logits(PROMPT)) < 1e-12


def test_experts_in_one_tensor_and_experts_one_by_one_are_the_same(tmp_path: Path) -> None:
    seed = seed_of(qwen3_5, lambda text: hasattr(text, "num_experts"))
    folder = save_random(tmp_path, qwen3_5(random.Random(seed)), seed)
    expected = logits(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    others = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    assert len(others) < len(tensors)
    is_packed = any(name.endswith("experts.gate_up_proj") for name in tensors)
    repacked = _one_by_one(tensors) if is_packed else _in_one_tensor(tensors)
    save_file(others | repacked, file, metadata={"format": "pt"})
    assert torch.equal(logits(folder), expected)


def _in_one_tensor(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name in tensors:
        if name.endswith("experts.0.gate_proj.weight"):
            root = name.removesuffix("0.gate_proj.weight")
            gate, up, down = (
                _stacked(tensors, root, part) for part in ("gate_proj", "up_proj", "down_proj")
            )
            found[f"{root}gate_up_proj"] = torch.cat((gate, up), dim=1)
            found[f"{root}down_proj"] = down
    return found


def _stacked(tensors: dict[str, Tensor], root: str, part: str) -> Tensor:
    suffix = f".{part}.weight"
    count = sum(name.startswith(root) and name.endswith(suffix) for name in tensors)
    return torch.stack([tensors[f"{root}{expert}{suffix}"] for expert in range(count)])


def _one_by_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in tensors.items():
        root, _, last = name.rpartition(".experts.")
        for expert, rows in enumerate(tensor if root else []):
            if last == "gate_up_proj":
                gate, up = rows.chunk(2)
                found[f"{root}.experts.{expert}.gate_proj.weight"] = gate.contiguous()
                found[f"{root}.experts.{expert}.up_proj.weight"] = up.contiguous()
            else:
                found[f"{root}.experts.{expert}.down_proj.weight"] = rows.contiguous()
    return found


def written(folder: Path, **changes: object) -> Path:
    """A folder with a changed config of a Qwen3-Next."""
    raw = qwen3_next(random.Random(3)).to_dict()
    raw |= {"architectures": ["Qwen3NextForCausalLM"], **changes}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_without_layer_types_every_fourth_layer_attends(tmp_path: Path) -> None:
    words = (["linear_attention"] * 3 + ["full_attention"]) * 2
    by_words = load_config(written(tmp_path, num_hidden_layers=8, layer_types=words))
    changes = {"num_hidden_layers": 8, "layer_types": None, "full_attention_interval": 4}
    assert load_config(written(tmp_path, **changes)) == by_words


def test_experts_stand_in_every_nth_layer_that_is_not_named_dense(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 6, "layer_types": ["linear_attention"] * 6}
    folder = written(tmp_path, **changes, decoder_sparse_step=2, mlp_only_layers=[3])
    config = load_config(folder)
    assert isinstance(config, QwenHybridConfig)
    kinds = [type(shape) for shape in config.feed_forwards]
    assert kinds == [MlpShape, MixtureShape, MlpShape, MlpShape, MlpShape, MixtureShape]


def test_a_delta_net_keeps_its_convolution_in_three_sections(tmp_path: Path) -> None:
    folder = save_random(tmp_path, qwen3_next(random.Random(3)), 3)
    manifest = load_model(folder, LoadOptions("bfloat16", page_size=16)).manifest
    shapes = [shape for layer in load_config(folder).states for shape in layer]
    delta = next(shape for shape in shapes if isinstance(shape, DeltaShape))
    (recurrent,) = [layout for layout in manifest.layouts if layout.kind is delta.kind]
    layer = recurrent.layers[0]
    taps = delta.conv_width - 1
    found = {s.name: (s.shape, s.dtype) for s in recurrent.sections if s.layer == layer}
    assert found == {
        "conv.q": ((delta.key_dim, taps), "bfloat16"),
        "conv.k": ((delta.key_dim, taps), "bfloat16"),
        "conv.v": ((delta.value_dim, taps), "bfloat16"),
        "ssm": ((delta.v_heads, delta.k_dim, delta.v_dim), "float32"),
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("layer_types", ["linear_attention", "sliding_attention"]),
        ("linear_num_value_heads", 7),
        ("linear_conv_kernel_dim", 1),
        ("num_experts_per_tok", 99),
        ("decoder_sparse_step", 0),
        ("head_dim", None),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    field: str, value: object, tmp_path: Path
) -> None:
    changes: dict[str, object] = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    with pytest.raises(ConfigError, match=field):
        load_config(written(tmp_path, **{**changes, field: value}))
