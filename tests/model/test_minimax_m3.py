"""MiniMax M3: published fields and tensors, FP8 pages, refusals."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model.comparison import random_config
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.paged_run import PagedRun, Part
from tests.model.ragged import random_prompt
from tests.tiny_models import save_random
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.model.config import load_config
from ferryman.model.families.minimax_m3 import MiniMaxM3Config
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.shapes.attention_shapes import BlockIndexShape, RotaryPositions

PUBLISHED = Path(__file__).parent / "published" / "MiniMaxAI--MiniMax-M3.json"
PROMPT = random_prompt(random.Random(5), 70, VOCAB_SIZE)
SEED = 0
"""Of a model with both kinds of layers and of feed-forwards, whose index chooses a part."""


def published() -> dict[str, Any]:
    config: dict[str, Any] = json.loads(PUBLISHED.read_text())["config"]
    return config


def read(folder: Path, raw: dict[str, Any]) -> MiniMaxM3Config:
    (folder / "config.json").write_text(json.dumps(raw))
    config = load_config(folder)
    assert isinstance(config, MiniMaxM3Config)
    return config


def logits(folder: Path, **options: str) -> Tensor:
    run = PagedRun(load_model(folder, LoadOptions("float32", page_size=8, **options)))  # type: ignore[arg-type]
    return run.prefill([Part(run.start(), PROMPT)])[0]


def test_the_published_config_is_read_completely(tmp_path: Path) -> None:
    config = read(tmp_path, published())
    assert config.index == BlockIndexShape(4, 128, block_len=128, count=16, num_local=1)
    assert config.is_sparse == (False,) * 3 + (True,) * 57
    assert [type(shape).__name__ for shape in config.feed_forwards[2:4]] == [
        "MlpShape",
        "MixtureShape",
    ]
    positions = config.attention.positions
    assert isinstance(positions, RotaryPositions)
    assert (positions.rotary_dim, positions.theta) == (64, 5e6)


def test_the_text_of_a_folder_that_also_reads_images_is_the_same(tmp_path: Path) -> None:
    raw = published()
    whole = {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "text_config": raw,
        "vision_config": {"hidden_size": 1280},
    }
    assert read(tmp_path, whole) == read(tmp_path, raw)


def _sparse(**changed: object) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def edited(raw: dict[str, Any]) -> dict[str, Any]:
        return {**raw, "sparse_attention_config": {**raw["sparse_attention_config"], **changed}}

    return edited


def _whole(**changed: object) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda raw: {**raw, **changed}


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        (_sparse(sparse_score_type="mean"), "sparse_score_type"),
        (_sparse(sparse_init_block=1), "sparse_init_block"),
        (_sparse(use_sparse_attention=False), "use_sparse_attention"),
        (_sparse(sparse_disable_index_value=[0] * 60), "sparse_disable_index_value"),
        (_sparse(sparse_attention_freq=[1] * 59), "sparse_attention_freq"),
        (_sparse(sparse_num_index_heads=2), "index_n_heads"),
        (_sparse(sparse_index_dim=32), "index_head_dim"),
        (_sparse(sparse_local_block=17), "index_local_blocks"),
        (_whole(moe_layer_freq=[2] * 60), "moe_layer_freq"),
        (_whole(rotary_dim=128), "rotary_dim"),
        (_whole(attention_output_gate=True), "attention_output_gate"),
        (_whole(qk_norm_type="per_layer"), "qk_norm_type"),
        (_whole(n_shared_experts=2), "n_shared_experts"),
        (_whole(hidden_act="gelu"), "hidden_act"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_what_the_layers_do_not_compute_is_refused_by_its_name(
    edit: Callable[[dict[str, Any]], dict[str, Any]], field: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=field):
        read(tmp_path, edit(published()))


_PUBLISHED_NAMES = (
    (r"^(model|lm_head)\.", r"language_model.\1."),
    (r"\.mlp\.(experts|shared_experts)\.", r".block_sparse_moe.\1."),
    (r"\.mlp\.gate\.weight", ".block_sparse_moe.gate.weight"),
    (r"\.mlp\.gate\.e_score", ".block_sparse_moe.e_score"),
    (r"\.indexer\.([qk])_(proj|norm)", r".index_\1_\2"),
)


def _as_published(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Each tensor under the names of the published checkpoint."""
    for pattern, new in _PUBLISHED_NAMES:
        name = re.sub(pattern, new, name)
    if name.endswith("experts.gate_up_proj"):
        stem, halves = name.removesuffix("gate_up_proj"), tensor.chunk(2, dim=1)
        return {
            f"{stem}{expert}.{short}.weight": half[expert].contiguous()
            for expert in range(len(tensor))
            for short, half in zip(("w1", "w3"), halves, strict=True)
        }
    if name.endswith("experts.down_proj"):
        stem = name.removesuffix("down_proj")
        return {f"{stem}{i}.w2.weight": part.contiguous() for i, part in enumerate(tensor)}
    if name.endswith("gate_up_proj.weight"):
        stem, (gate, up) = name.removesuffix("gate_up_proj.weight"), tensor.chunk(2)
        return {
            f"{stem}gate_proj.weight": gate.contiguous(),
            f"{stem}up_proj.weight": up.contiguous(),
        }
    return {name: tensor}


def test_published_tensors_and_those_of_transformers_are_one_model(tmp_path: Path) -> None:
    folder = save_random(tmp_path, random_config("minimax_m3", SEED), SEED)
    config = load_config(folder)
    assert isinstance(config, MiniMaxM3Config)
    assert len(set(config.is_sparse)) == len({type(s) for s in config.feed_forwards}) == 2
    expected, path = logits(folder), folder / "model.safetensors"
    tensors = load_file(path)
    renamed = [_as_published(name, tensor) for name, tensor in tensors.items()]
    published_tensors = {name: part for parts in renamed for name, part in parts.items()}
    assert not set(published_tensors) & set(tensors)
    save_file(published_tensors, path)
    assert torch.equal(logits(folder), expected)


def test_blocks_are_chosen_over_pages_of_codes(tmp_path: Path) -> None:
    """Keys and values are rounded to e4m3, the index is not: the answers are near."""
    folder = save_random(tmp_path, random_config("minimax_m3", SEED), SEED)
    plain, coded = logits(folder), logits(folder, kv_dtype="fp8")
    assert not torch.equal(plain, coded)
    assert float((plain - coded).norm() / plain.norm()) < 0.2


def test_fewer_blocks_give_another_answer(tmp_path: Path) -> None:
    """Otherwise no test of this model could tell attention to blocks from full attention."""
    folder = save_random(tmp_path, random_config("minimax_m3", SEED), SEED)
    config = load_config(folder)
    assert isinstance(config, MiniMaxM3Config)
    assert config.index.count * config.index.block_len < len(PROMPT)
    before = logits(folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "index_topk_blocks": 200}))
    assert load_config(folder) == replace(config, index=replace(config.index, count=200))
    assert not torch.allclose(logits(folder), before, atol=1e-3)
