"""Weights are checked by name, shape and dtype before anything runs; pickles are never opened."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model.conftest import FolderOf, prompt
from tests.model.paged_run import PagedRun, Part
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model, model_fingerprint
from ferryman.model.weights.checkpoint import open_checkpoint

IN_PROJ = "model.layers.0.mamba.in_proj.weight"

Tensors = dict[str, Tensor]
Rewrite = Callable[[Tensors], object]


@pytest.fixture
def copied(folder_of: FolderOf, tmp_path: Path) -> Path:
    """A copy of the Bamba folder, to be broken."""
    shutil.copytree(folder_of("bamba"), tmp_path / "model")
    return tmp_path / "model"


def rewrite(folder: Path, change: Rewrite) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder: Path) -> None:
    """Splits the single file into two shards and an index."""
    tensors = load_file(folder / "model.safetensors")
    names, weight_map = sorted(tensors), {}
    for number in (1, 2):
        file = f"model-{number:05}-of-00002.safetensors"
        part = names[number - 1 :: 2]
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


def logits(folder: Path) -> Tensor:
    run = PagedRun(load_model(folder, LoadOptions("float64", page_size=16)))
    return run.prefill([Part(run.start(), prompt(0)[:20])])[0]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        pytest.param(lambda tensors: tensors.pop(IN_PROJ), "is missing from", id="missing"),
        pytest.param(
            lambda tensors: tensors.update({IN_PROJ: torch.zeros(3, 5)}),
            r"has shape \[3, 5\], but config.json implies \[",
            id="wrong shape",
        ),
        pytest.param(
            lambda tensors: tensors.update({IN_PROJ: tensors[IN_PROJ].to(torch.int8)}),
            "has dtype I8; supported are",
            id="wrong dtype",
        ),
    ],
)
def test_a_wrong_tensor_is_refused_by_its_name(
    change: Rewrite, complaint: str, copied: Path
) -> None:
    rewrite(copied, change)
    with pytest.raises(ConfigError, match=complaint) as refusal:
        load_model(copied, LoadOptions("float32"))
    assert IN_PROJ in str(refusal.value)
    assert "model.safetensors" in str(refusal.value)


def test_a_pickle_checkpoint_is_refused_by_its_name(copied: Path) -> None:
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is a pickle checkpoint"):
        load_model(copied, LoadOptions("float32"))


def test_a_folder_without_weights_is_refused(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has neither"):
        load_model(copied, LoadOptions("float32"))


def test_a_cut_off_file_is_refused(copied: Path) -> None:
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="not a complete safetensors file"):
        load_model(copied, LoadOptions("float32"))


def test_an_unknown_dtype_is_refused(copied: Path) -> None:
    with pytest.raises(ConfigError, match="'float8' is not supported; choose one of"):
        load_model(copied, LoadOptions("float8"))


def test_shards_give_the_same_model_as_one_file(copied: Path) -> None:
    whole, fingerprint = logits(copied), model_fingerprint(copied, "float64")
    shard(copied)
    assert torch.equal(logits(copied), whole)
    assert model_fingerprint(copied, "float64") == fingerprint


def test_a_missing_shard_is_refused_by_its_name(copied: Path) -> None:
    shard(copied)
    (copied / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors is missing"):
        open_checkpoint(copied)


def test_a_shard_outside_the_folder_is_refused(copied: Path) -> None:
    shard(copied)
    index = copied / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {IN_PROJ: "../elsewhere.safetensors"}}))
    with pytest.raises(ConfigError, match=r"a shard is a \.safetensors file beside it"):
        open_checkpoint(copied)


def test_an_index_that_promises_too_much_is_refused(copied: Path) -> None:
    shard(copied)
    index = copied / "model.safetensors.index.json"
    promised = json.loads(index.read_text())
    promised["weight_map"]["model.ghost"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(promised))
    with pytest.raises(ConfigError, match=r"lacks tensor 'model\.ghost'"):
        open_checkpoint(copied)


def test_one_changed_weight_changes_the_fingerprint(copied: Path) -> None:
    before = model_fingerprint(copied, "float32")
    assert before != model_fingerprint(copied, "bfloat16")
    rewrite(copied, lambda tensors: tensors[IN_PROJ][0, 0].add_(1e-6))
    assert model_fingerprint(copied, "float32") != before


def test_one_changed_field_of_the_config_changes_the_fingerprint(copied: Path) -> None:
    before = model_fingerprint(copied, "float32")
    path = copied / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw, indent=7))
    assert model_fingerprint(copied, "float32") == before
    path.write_text(json.dumps({**raw, "rms_norm_eps": 1e-3}))
    assert model_fingerprint(copied, "float32") != before


def test_experts_are_found_under_their_newer_names(folder_of: FolderOf, tmp_path: Path) -> None:
    renames = {
        "input_linear.weight": "experts.gate_up_proj",
        "output_linear.weight": "experts.down_proj",
        "router.layer.weight": "router.weight",
    }
    shutil.copytree(folder_of("granite_moe"), tmp_path / "model")

    def rename(tensors: Tensors) -> None:
        for name in [name for name in tensors if "block_sparse_moe" in name]:
            stem, _, tail = name.partition("block_sparse_moe.")
            tensors[f"{stem}block_sparse_moe.{renames[tail]}"] = tensors.pop(name)

    rewrite(tmp_path / "model", rename)
    assert torch.equal(logits(tmp_path / "model"), logits(folder_of("granite_moe")))
