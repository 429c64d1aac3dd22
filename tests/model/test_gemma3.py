"""Gemma 3 as it is published: sparse configs, a text model beside a vision tower, its own scale."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model.differences import difference
from tests.model.paged_run import PagedRun, Part
from tests.oracle import load_oracle
from tests.tiny_models import save_random
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    SiglipVisionConfig,
)

from ferryman.errors import ConfigError
from ferryman.model.config import load_config
from ferryman.model.layers.decoder import Decoder
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.shapes.attention_shapes import AttentionShape, HeadNorm
from ferryman.model.shapes.rotary import LinearScaling, NoScaling

TEXT = Gemma3TextConfig(
    vocab_size=61,
    hidden_size=40,
    intermediate_size=32,
    num_hidden_layers=7,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    query_pre_attn_scalar=24,
    sliding_window=11,
    eos_token_id=2,
)

OF_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}
"""All that google/gemma-3-4b-it states about its text model."""


def _attention(folder: Path) -> list[AttentionShape]:
    found = [shape for (shape,) in load_config(folder).states]
    assert all(isinstance(shape, AttentionShape) for shape in found)
    return [shape for shape in found if isinstance(shape, AttentionShape)]


def _written(folder: Path, raw: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_what_a_published_config_leaves_out_is_known(tmp_path: Path) -> None:
    shapes = _attention(_written(tmp_path, OF_4B))
    trunk = load_config(tmp_path).trunk
    assert [bool(shape.window_len) for shape in shapes] == [i % 6 != 5 for i in range(34)]
    assert {shape.window_len for shape in shapes} == {0, 1024}
    assert (shapes[0].q_heads, shapes[0].kv_heads, shapes[0].head_dim) == (8, 4, 256)
    assert (shapes[0].scale, shapes[0].head_norm) == (256**-0.5, HeadNorm.EACH_HEAD)
    near, far = shapes[0].positions, shapes[5].positions
    assert (near.theta, near.scaling) == (10_000.0, NoScaling())  # type: ignore[union-attr]
    assert (far.theta, far.scaling) == (1_000_000.0, LinearScaling(8.0))  # type: ignore[union-attr]
    assert (trunk.vocab_size, trunk.ties_embeddings) == (262_208, True)
    assert trunk.eos_token_ids == (1, 106)


def test_the_old_and_the_new_names_of_rotary_fields_mean_the_same(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    raw = {**OF_4B["text_config"], "architectures": ["Gemma3ForCausalLM"]}
    del raw["rope_scaling"]
    for folder in (old, new):
        folder.mkdir()
    named = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": None}
    _written(old, {**raw, **named})
    nested = {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    _written(new, {**raw, "rope_parameters": nested})
    assert load_config(old) == load_config(new)
    assert {s.positions.theta for s in _attention(old)} == {2e4, 5e5}  # type: ignore[union-attr]


@pytest.mark.parametrize("is_old_format", [True, False], ids=["published names", "new names"])
def test_a_folder_that_also_sees_images_serves_as_its_text_model(
    is_old_format: bool, tmp_path: Path
) -> None:
    text = save_random(tmp_path / "text", TEXT, 3)
    vision = SiglipVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        image_size=28, patch_size=14,
    )  # fmt: skip
    whole = Gemma3ForConditionalGeneration(Gemma3Config(text_config=TEXT, vision_config=vision))
    whole.save_pretrained(tmp_path / "whole")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    names = {name for name in tensors if "language_model" in name}
    assert names
    for name, tensor in load_file(text / "model.safetensors").items():
        old, new = f"language_model.{name}", f"model.language_model.{name.removeprefix('model.')}"
        assert {old, new} & names
        for written in names & {old, new}:
            del tensors[written]
        tensors[old if is_old_format else new] = tensor
    save_file(tensors, tmp_path / "whole" / "model.safetensors", {"format": "pt"})
    prompt = [random.Random(1).randrange(61) for _ in range(60)]
    run = PagedRun(load_model(tmp_path / "whole", LoadOptions("float64", page_size=8)))
    (found,) = run.prefill([Part(run.start(), prompt)])
    expected = load_oracle(text, torch.float64).logits(prompt)
    assert difference(found, expected) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_scale_of_the_embedding_is_rounded_as_transformers_rounds_it(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """√40 = 6.3246 is 6.3125 in bfloat16."""
    folder = save_random(tmp_path, TEXT, 3)
    model = load_model(folder, LoadOptions(str(dtype).removeprefix("torch.")))
    assert isinstance(model, Decoder)
    theirs = load_oracle(folder, dtype).model.get_input_embeddings()
    tokens = torch.arange(61)
    with torch.inference_mode():
        assert torch.equal(model.ends.embed(tokens), theirs(tokens))
    if dtype is torch.bfloat16:
        assert model.ends.scales.embedding_multiplier == 6.3125


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param({"hidden_activation": "relu"}, ["hidden_activation", "relu"], id="activation"),
        pytest.param({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"], id="scores"),
        pytest.param(
            {"use_bidirectional_attention": True}, ["use_bidirectional_attention"], id="both ways"
        ),
        pytest.param({"sliding_window": None}, ["sliding_window"], id="no window"),
        pytest.param(
            {"rope_scaling": {"rope_type": "axial", "factor": 2}}, ["rope_type"], id="rope"
        ),
        pytest.param({"quantization_config": {"quant_method": "mxfp4"}}, ["mxfp4"], id="weights"),
    ],
)
def test_an_unsupported_config_is_refused_by_name(
    change: dict[str, Any], named: list[str], tmp_path: Path
) -> None:
    raw = {**OF_4B["text_config"], "architectures": ["Gemma3ForCausalLM"], **change}
    with pytest.raises(ConfigError) as refusal:
        load_config(_written(tmp_path, raw))
    assert all(word in str(refusal.value) for word in named), refusal.value
