"""HY V4: the names of its published tensors, its wide head, and fields that say nothing."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model.comparison import random_config
from tests.model.families.hy_v4 import HALVES
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.neighbouring_channels import with_neighbours
from tests.model.paged_run import PagedRun
from tests.model.ragged import ragged_logits, random_prompt
from tests.tiny_models import save_random
from torch import Tensor

from ferryman.model.config import load_config
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model

SEED = 11
"""A config with experts, with layers that share an indexer, and with a head of its own."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As transformers writes it, whose names are neither the published ones nor its modules'."""
    return save_random(tmp_path / "written", random_config("hy_v4", SEED), SEED)


def published(name: str) -> str:
    """The name of tencent/Hy4-preview for a tensor that transformers wrote."""
    name = re.sub(r"\.hc_pre\.(hc_attn_layer|hc_mlp_layer)\.", r".\1.hc_pre.", name)
    name = name.replace(".hc_pre.hc_head.", ".hc_head.")
    return re.sub(r"(mlp\..*)linear_gate", r"\1gate_proj", name)


def of_modules(name: str) -> str:
    """The name of its module in transformers."""
    for old, new in (("hc_attn_layer.hc_", "attn_hc."), ("hc_mlp_layer.hc_", "ffn_hc.")):
        name = name.replace(f"hc_pre.{old}", new)
    name = name.replace("hc_pre.hc_head.hc_head_", "hc_head.hc_")
    return name.replace("linear_gate", "gate_proj").replace("learnable_sink_param", "sinks")


def renamed(folder: Path, to: Path, rename: Callable[[str], str]) -> Path:
    to.mkdir()
    (to / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in tensors.items()}, to / "model.safetensors")
    return to


def logits(folder: Path) -> list[Tensor]:
    rng = random.Random(5)
    prompts = [random_prompt(rng, length, VOCAB_SIZE) for length in (9, 40)]
    model = load_model(folder, LoadOptions("float64", page_size=8))
    return ragged_logits(PagedRun(model, 5), prompts, rng)


@pytest.mark.parametrize("rename", [published, of_modules])
def test_tensors_are_read_by_any_of_their_names(
    folder: Path, rename: Callable[[str], str], tmp_path: Path
) -> None:
    other = renamed(folder, tmp_path / "renamed", rename)
    names, new_names = (set(load_file(f / "model.safetensors")) for f in (folder, other))
    assert len(new_names - names) > 6
    for one, same in zip(logits(folder), logits(other), strict=True):
        assert torch.equal(one, same)


def test_neighbouring_channels_turn_unless_a_config_says_otherwise(
    folder: Path, tmp_path: Path
) -> None:
    """As other servers turn those of published weights."""
    raw = json.loads((folder / "config.json").read_text())
    paired = tmp_path / "paired"
    paired.mkdir()
    tensors = load_file(folder / "model.safetensors")
    moved = with_neighbours(tensors, raw)
    assert any(not torch.equal(moved[name], tensor) for name, tensor in tensors.items())
    save_file(moved, paired / "model.safetensors")
    plain = {name: value for name, value in raw.items() if name not in HALVES}
    assert plain.keys() != raw.keys()
    (paired / "config.json").write_text(json.dumps(plain))
    for one, same in zip(logits(folder), logits(paired), strict=True):
        assert torch.equal(one, same)


def test_a_head_is_not_rounded_to_the_model_s_dtype(folder: Path) -> None:
    model = load_model(folder, LoadOptions("bfloat16", page_size=8))
    stored = load_file(folder / "model.safetensors")["lm_head.weight"].double()
    normed = torch.randn(5, stored.shape[1]).bfloat16()
    right = normed.double() @ stored.T
    torch.testing.assert_close(
        model.ends.logits_of_normed(normed).double(), right, rtol=1e-5, atol=1e-5
    )
    narrow = normed.double() @ stored.bfloat16().double().T
    assert (narrow - right).abs().max() > 1e-3


def test_a_number_of_key_heads_says_nothing(folder: Path) -> None:
    """The published config has 8 of 64, and all heads read one row."""
    right, path = load_config(folder), folder / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "num_key_value_heads": 8}))
    assert load_config(folder) == right


def test_lists_that_are_left_out_have_their_meaning(tmp_path: Path) -> None:
    config = random_config("hy_v4", SEED)
    config.architectures = ["HYV4ForCausalLM"]
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    raw = {**json.loads(path.read_text()), "num_hidden_layers": 7}
    for name in ("indexer_types", "mlp_layer_types", "layer_types", "first_k_dense_replace"):
        raw.pop(name, None)
    path.write_text(json.dumps(raw))
    read = load_config(tmp_path)
    kept = [len(shapes) for shapes in read.states]
    assert kept == [2, 2, 1, 1, 1, 2, 1]
