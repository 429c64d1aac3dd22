"""A model is the same model from its folder and from its GGUF file: config, tensors and tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.gguf_models.conversion import split_experts, write_converted
from tests.gguf_models.files import floats, q8_0, write
from tests.gguf_models.hybrid_models import HYBRIDS
from tests.gguf_models.sparse_models import SPARSE
from tests.gguf_models.transformer_models import TRANSFORMERS
from tests.gguf_models.variant_models import VARIANTS
from tests.tiny_models import save_random
from tests.tools.bench.gguf_reader import GgufReader
from tests.tools.bench.tiny_shapes import save_tiny
from tools.bench.gguf.container import Setting
from tools.bench.gguf.conversion import convert_folder
from transformers import (
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    HunYuanDenseV1Config,
    LlamaConfig,
    Olmo2Config,
    Olmo3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from ferryman.errors import ConfigError
from ferryman.gguf.architectures import ARCHITECTURES
from ferryman.gguf.model_file import model_name
from ferryman.model.config import load_config
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model, model_fingerprint
from ferryman.model.shapes.rotary import rotary_frequencies
from ferryman.model.weights.gguf_checkpoint import open_gguf, open_model

SIZES: Mapping[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
EXPERTS: Mapping[str, Any] = {
    **SIZES,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
WINDOWS: Mapping[str, Any] = {**SIZES, "sliding_window": 32, "query_pre_attn_scalar": 16}
FOUR_LAYERS: Mapping[str, Any] = {**SIZES, "num_hidden_layers": 4}
HALF_TURNING = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
MODELS: Mapping[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "smollm3": SmolLM3Config(**FOUR_LAYERS),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2vl": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "qwen2moe": Qwen2MoeConfig(**EXPERTS, shared_expert_intermediate_size=48),
    "qwen3moe": Qwen3MoeConfig(**EXPERTS, norm_topk_prob=True),
    "gemma": GemmaConfig(**SIZES),
    "gemma2": Gemma2Config(**WINDOWS),
    "gemma3": Gemma3TextConfig(**{**WINDOWS, "num_hidden_layers": 7}),
    "glm4": Glm4Config(**SIZES, rope_parameters=HALF_TURNING),
    "seed_oss": SeedOssConfig(**SIZES),
    "ernie4_5": Ernie4_5Config(**SIZES),
    "hunyuan-dense": HunYuanDenseV1Config(**SIZES),
    "olmo2": Olmo2Config(**SIZES),
    "olmo2 of OLMo 3": Olmo3Config(**FOUR_LAYERS, sliding_window=32),
    "exaone4": Exaone4Config(
        **FOUR_LAYERS, sliding_window=None, layer_types=["full_attention"] * 4
    ),
    "exaone4 with windows": Exaone4Config(**FOUR_LAYERS, sliding_window=32),
    **TRANSFORMERS,
}
"""By the architecture in files, which some words may follow."""
BENCH = ("granite", "granite-experts", "granite-hybrid", "granite-hybrid-experts")
"""Models that the bench converts, whose files llama.cpp answered from as from the folder."""


@pytest.fixture(params=[*MODELS, *BENCH])
def folder_and_file(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    name, folder, file = request.param, tmp_path / "folder", tmp_path / "tiny.gguf"
    if name in BENCH:
        save_tiny(folder, name)
        convert_folder(folder, "float32")
        (folder / "gguf").rename(file)
        return folder, file
    save_random(folder, MODELS[name], seed=1)
    tensors = folder / "model.safetensors"
    save_file(split_experts(load_file(tensors)), tensors, metadata={"format": "pt"})
    return folder, write_converted(folder, file, name.split()[0])


def test_a_file_has_the_config_and_the_tensors_of_its_folder(
    folder_and_file: tuple[Path, Path],
) -> None:
    folder, file = folder_and_file
    expected: Any = load_config(folder)
    actual = load_config(file)
    # The bench writes no vocabulary, so nothing in its files ends a generation.
    ends = replace(expected.trunk, eos_token_ids=actual.trunk.eos_token_ids)
    assert actual == replace(expected, trunk=ends)
    ours, theirs = open_model(file), open_model(folder)
    names = {name for name in theirs.tensors if name != "lm_head.weight"}
    assert names <= ours.tensors.keys()
    for name in names:
        view, weight = (held.view(held.tensors[name]).float() for held in (ours, theirs))
        assert view.shape == weight.shape, name
        if "hybrid" in expected_name(folder) and name.endswith(("q_proj.weight", "k_proj.weight")):
            # Without positions the order of a head's channels has no meaning, if that of q and k is
            # the same: llama.cpp's converter pairs them all the same, the bench does not.
            view, weight = view.sort(dim=0).values, weight.sort(dim=0).values
        # A norm was stored as 1 + w, A_log as its exponential: both are rounded once.
        assert torch.allclose(view, weight, rtol=1e-6, atol=1e-6), name


def expected_name(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text())["architectures"]).lower()


def test_every_architecture_is_tried() -> None:
    by_bench = {"granite", "granitemoe", "granitehybrid"}
    plain = {name.split()[0] for name in MODELS}
    hybrids = {architecture for architecture, _ in [*HYBRIDS.values(), *VARIANTS.values()]}
    sparse = {architecture for architecture, _ in SPARSE.values()}
    assert set(ARCHITECTURES) == {*plain, *by_bench, *hybrids, *sparse}


def tiny_llama(folder: Path, more: Mapping[str, Setting] | None = None) -> tuple[Path, Path]:
    save_random(folder / "folder", MODELS["llama"], seed=1)
    return folder / "folder", write_converted(
        folder / "folder", folder / "tiny.gguf", "llama", more
    )


def test_a_file_in_blocks_is_the_model_of_the_numbers_that_they_stand_for(tmp_path: Path) -> None:
    _, plain = tiny_llama(tmp_path)
    checkpoint = open_gguf(plain)
    metadata, tensors = rewritten(plain)
    coded = [
        q8_0(name, values) if values.ndim == 2 else floats(name, values)
        for name, values in tensors.items()
    ]
    file = write(tmp_path / "coded.gguf", metadata, coded)
    (weight,) = (tensor for tensor in coded if tensor.name == "blk.0.attn_q.weight")
    blocks = np.frombuffer(weight.content, np.dtype([("d", "<f2"), ("q", "i1", 32)]))
    rows = (blocks["d"].astype(np.float32)[:, None] * blocks["q"]).reshape(4, 8, 2, 64)
    expected = rows.swapaxes(1, 2).reshape(64, 64)
    held = open_gguf(file)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(held.view(held.tensors[name]), torch.from_numpy(expected.copy()))
    exact = checkpoint.view(checkpoint.tensors[name])
    assert 0 < (held.view(held.tensors[name]) - exact).abs().max() < 0.1
    options = LoadOptions("float32", page_size=16)
    assert load_model(file, options).manifest.fingerprint == model_fingerprint(file, "float32")
    assert model_fingerprint(file, "float32") != model_fingerprint(plain, "float32")


def test_shards_are_one_model(tmp_path: Path) -> None:
    _, whole = tiny_llama(tmp_path)
    metadata, tensors = rewritten(whole)
    half = len(tensors) // 2
    parts = (list(tensors.items())[:half], list(tensors.items())[half:])
    first, second = (tmp_path / f"tiny-0000{number}-of-00002.gguf" for number in (1, 2))
    for file, part in zip((first, second), parts, strict=True):
        write(file, {**metadata, "split.count": 2}, [floats(*named) for named in part])
    assert load_config(first) == load_config(whole)
    assert model_fingerprint(first, "float32") == model_fingerprint(whole, "float32")
    assert model_name(first) == model_name(whole) == "tiny"
    with pytest.raises(ConfigError, match=r"name the first shard, tiny-00001-of-00002\.gguf"):
        load_config(second)
    second.unlink()
    with pytest.raises(ConfigError, match=r"tiny-00002-of-00002\.gguf is missing"):
        load_config(first)


def test_heads_that_turn_in_part_are_paired_whole(tmp_path: Path) -> None:
    """So the converter lays those of Bamba, of which a half turns."""
    folder, file = tiny_llama(tmp_path, {"llama.rope.dimension_count": 8})
    ours, theirs = open_gguf(file), open_model(folder)
    for name in ("q_proj.weight", "k_proj.weight", "q_proj.bias"):
        full = f"model.layers.1.self_attn.{name}"
        assert torch.equal(*(held.view(held.tensors[full]) for held in (ours, theirs))), name


def test_factors_of_the_waves_are_those_of_llama_3(tmp_path: Path) -> None:
    folder, plain = tiny_llama(tmp_path)
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    config = json.loads((folder / "config.json").read_text())
    waves = 1 / 10_000 ** (np.arange(0, 16, 2) / 16)
    turns = 256 * waves / (2 * np.pi)
    kept = np.clip((turns - 1) / 3, 0, 1)
    factors = 1 / ((1 - kept) / 8 + kept)
    (folder / "config.json").write_text(
        json.dumps({**config, "rope_parameters": {**rope, "rope_theta": 10_000.0}})
    )
    metadata, tensors = rewritten(plain)
    tensors["rope_freqs.weight"] = factors.astype(np.float32)
    file = write(tmp_path / "long.gguf", metadata, [floats(*named) for named in tensors.items()])
    expected, actual = (_waves(load_config(model)) for model in (folder, file))
    assert torch.allclose(actual, expected, rtol=1e-6)


YARN: Mapping[str, Setting] = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 32.0,
    "llama.rope.scaling.original_context_length": 16,
}


def growth_of(file: Path) -> float:
    """The factor of rotated q and k."""
    config: Any = load_config(file)
    return float(config.attention[0].positions.scaling.attention_factor)


def test_scores_grow_as_the_file_says(tmp_path: Path) -> None:
    """A folder's `attention_factor` is a key; llama.cpp takes YaRN's own number for it."""
    _, file = tiny_llama(tmp_path, {**YARN, "llama.rope.scaling.yarn_attn_factor": 1.25})
    assert growth_of(file) == 1.25


def test_a_growth_that_is_yarns_own_is_not_rounded(tmp_path: Path) -> None:
    """Laguna and OLMo 3 name the number of the formula, which a file has in 32 bits."""
    own = 0.1 * math.log(32.0) + 1.0
    _, file = tiny_llama(tmp_path, {**YARN, "llama.rope.scaling.yarn_attn_factor": own})
    assert growth_of(file) == own


def _waves(config: Any) -> torch.Tensor:
    positions = config.attention[0].positions
    scaling = positions.theta, positions.rotary_dim, positions.scaling
    return rotary_frequencies(*scaling, torch.float64)[0]


REFUSED: Mapping[str, tuple[Mapping[str, Setting], str]] = {
    "architecture": (
        {"general.architecture": "llama5"},
        "of the architecture llama5 are not read; the nearest is llama",
    ),
    "another maker's": (
        {"general.architecture": "plamo"},
        r"of the architecture plamo are not read\. Read are llama",
    ),
    "an encoder": ({"general.architecture": "bert"}, "bert are not read: it does not write text"),
    "scaling": ({"llama.rope.scaling.type": "longrope"}, "must be one of none, linear, yarn"),
    "stretch": (
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 0.0,
            "llama.rope.scaling.original_context_length": 16,
            "llama.rope.scaling.yarn_attn_factor": 1.25,
        },
        "factor",
    ),
    "heads": ({"llama.attention.head_count": "four"}, "must be an array of whole numbers"),
    "values": ({"llama.attention.value_length": 8}, "must be 16, as that of keys; it is 8"),
    "turning": ({"llama.rope.dimension_count": 20}, "must be 1 to 16; it is 20"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused_by_its_key(name: str, tmp_path: Path) -> None:
    keys, message = REFUSED[name]
    _, file = tiny_llama(tmp_path, keys)
    with pytest.raises(ConfigError, match=message):
        load_config(file)


def test_a_tensor_that_no_table_knows_is_refused(tmp_path: Path) -> None:
    _, file = tiny_llama(tmp_path)
    metadata, tensors = rewritten(file)
    tensors["blk.0.attn_extra.weight"] = np.zeros(4, dtype=np.float32)
    write(file, metadata, [floats(*named) for named in tensors.items()])
    with pytest.raises(ConfigError, match=r"no tensor blk\.0\.attn_extra\.weight is known"):
        open_gguf(file)


def test_a_missing_tensor_is_named_as_the_loader_asks_for_it(tmp_path: Path) -> None:
    _, file = tiny_llama(tmp_path)
    metadata, tensors = rewritten(file)
    del tensors["blk.1.ffn_up.weight"]
    write(file, metadata, [floats(*named) for named in tensors.items()])
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight' is missing"):
        load_model(file, LoadOptions("float32", page_size=16))


def rewritten(file: Path) -> tuple[dict[str, Setting], dict[str, np.ndarray]]:
    """The metadata and the tensors in float32 of a file, to be written again with a change."""
    metadata, tensors = GgufReader(file).read()
    return metadata, {
        name: np.frombuffer(
            tensor.content, "<f4", count=int(np.prod(tensor.sizes)), offset=0
        ).reshape(tensor.sizes[::-1])
        for name, tensor in tensors.items()
    }
