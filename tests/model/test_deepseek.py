"""DeepSeek-V3 and V3.2: routing by its formula, state, published configs, refusals."""

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
from tests.model.families.deepseek import deepseek_v3, deepseek_v32
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.paged_run import PagedRun, Part
from tests.model.ragged import random_prompt
from tests.oracle import load_oracle
from tests.tiny_models import save_random
from torch import Tensor
from transformers import PretrainedConfig

from ferryman.cache.manifest import Kind
from ferryman.errors import ConfigError
from ferryman.model.config import load_config
from ferryman.model.families.deepseek import DeepseekConfig, SparseDeepseekConfig
from ferryman.model.layers.expert_router import grouped_router
from ferryman.model.layers.latent import head_products
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.shapes.attention_shapes import IndexShape, RotaryPositions
from ferryman.model.shapes.feed_forward_shapes import GroupedRouting, MoeShape
from ferryman.model.shapes.manifest import state_manifest
from ferryman.model.weights.linear import make_linear
from ferryman_kernels.products.packed_product import reads_panels

BLOCK_LEN = 128
PROMPT = random_prompt(random.Random(3), 60, VOCAB_SIZE)
Edit = Callable[[dict[str, Any]], object]

PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v32",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""The published form of DeepSeek-V3.2-Exp."""


def read(folder: Path, raw: dict[str, Any]) -> SparseDeepseekConfig | DeepseekConfig:
    (folder / "config.json").write_text(json.dumps(raw))
    config = load_config(folder)
    assert isinstance(config, SparseDeepseekConfig | DeepseekConfig)
    return config


def test_the_published_config_is_read_completely(tmp_path: Path) -> None:
    config = read(tmp_path, PUBLISHED)
    assert isinstance(config, SparseDeepseekConfig)
    assert config.index == IndexShape(heads=64, head_dim=128, count=2048)
    dense = config.dense
    assert dense.has_experts == (False,) * 3 + (True,) * 58
    assert dense.experts == MoeShape(num_experts=256, experts_per_token=8, inner_dim=2048)
    assert dense.routing == GroupedRouting(8, 4, norms_shares=True, scaling=2.5)
    assert dense.shared_mlp.inner_dim == 2048
    positions = dense.attention.positions
    assert isinstance(positions, RotaryPositions)
    assert (dense.attention.row_dim, positions.rotary_dim) == (576, 64)
    growth = 0.1 * torch.tensor(40.0, dtype=torch.float64).log() + 1
    assert dense.attention.scale == pytest.approx(float(192**-0.5 * growth**2), rel=1e-12)


def test_latents_and_index_keys_share_a_page_and_belong_to_no_rank(tmp_path: Path) -> None:
    config = read(tmp_path, PUBLISHED)
    manifest = state_manifest(config, "bfloat16", 64, "fingerprint")
    assert manifest.kinds == (Kind.FULL,)
    layout = manifest.layout(Kind.FULL)
    assert layout.layers == tuple(range(61))
    found = [(s.name, s.shape, s.shard_axis) for s in layout.sections if s.layer == 5]
    assert found == [("latent", (64, 576), None), ("index", (64, 128), None)]
    assert layout.slot_bytes == 61 * 64 * (576 + 128) * 2
    assert state_manifest(config, "bfloat16", 64, "fingerprint", 4) == manifest
    with pytest.raises(ConfigError, match="tp_size=3 does not divide q_heads 128"):
        state_manifest(config, "bfloat16", 64, "fingerprint", 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("moe_layer_freq", 2),
        ("hidden_act", "gelu"),
        ("num_key_value_heads", 8),
        ("qk_rope_head_dim", 63),
        ("n_group", 7),
        ("n_group", 256),
        ("topk_group", 9),
        ("num_experts_per_tok", 129),
        ("q_lora_rank", None),
        ("index_head_dim", 32),
        ("index_topk", 0),
        ("rope_interleave", False),
        ("layer_types", ["full_attention"] * 61),
        ("mlp_layer_types", ["dense"] * 60),
        ("quantization_config", {"quant_method": "quip"}),
        ("load_in_4bit", {"quant_method": "bitsandbytes"}),
        ("weight_block_size", {"quant_method": "fp8", "weight_block_size": [64, 0]}),
        ("fmt", {"quant_method": "fp8", "fmt": "e5m2"}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    field: str, value: object, tmp_path: Path
) -> None:
    read(tmp_path, PUBLISHED)
    edited = "quantization_config" if isinstance(value, dict) else field
    named = "partial_rotary_factor" if field == "qk_rope_head_dim" else field
    with pytest.raises(ConfigError, match=named):
        read(tmp_path, {**PUBLISHED, edited: value})


def naive_routing(
    scores: list[float], bias: list[float], routing: GroupedRouting, count: int
) -> dict[int, float]:
    """Shares by expert, for one token."""
    ranks = [score + added for score, added in zip(scores, bias, strict=True)]
    size = len(ranks) // routing.num_groups
    groups = [range(first, first + size) for first in range(0, len(ranks), size)]
    merit = [sum(sorted((ranks[e] for e in group), reverse=True)[:2]) for group in groups]
    order = sorted(range(len(groups)), key=lambda g: -merit[g])[: routing.groups_per_token]
    eligible = [expert for g in order for expert in groups[g]]
    chosen = sorted(eligible, key=lambda expert: -ranks[expert])[:count]
    total = sum(scores[expert] for expert in chosen) if routing.norms_shares else 1.0
    return {expert: routing.scaling * scores[expert] / total for expert in chosen}


@pytest.mark.parametrize("norms_shares", [False, True])
@pytest.mark.parametrize(("num_groups", "groups_per_token"), [(1, 1), (3, 1), (3, 2), (6, 6)])
def test_a_token_goes_to_the_best_experts_of_its_best_groups(
    num_groups: int, groups_per_token: int, norms_shares: bool
) -> None:
    generator = torch.Generator().manual_seed(num_groups)
    weight, hidden = (
        torch.randn(rows, 5, generator=generator, dtype=torch.float64) for rows in (12, 40)
    )
    bias = torch.randn(12, generator=generator, dtype=torch.float64)
    routing = GroupedRouting(num_groups, groups_per_token, norms_shares, scaling=1.7)
    shares, chosen = grouped_router(make_linear(weight), bias, routing, 2)(hidden)
    for token in range(len(hidden)):
        scores = (weight @ hidden[token]).sigmoid().tolist()
        expected = naive_routing(scores, bias.tolist(), routing, 2)
        found = dict(zip(chosen[token].tolist(), shares[token].tolist(), strict=True))
        assert found == pytest.approx(expected, rel=1e-12)


def logits(folder: Path, dtype: str = "float64") -> Tensor:
    run = PagedRun(load_model(folder, LoadOptions(dtype, page_size=8)))
    lane = run.start()
    (prefilled,) = run.prefill([Part(lane, PROMPT[:50])])
    return torch.cat([prefilled, *(run.decode([lane], [token]) for token in PROMPT[50:])])


def rebuilt(config: PretrainedConfig, **changed: Any) -> PretrainedConfig:
    """A config of two layers, the second with experts, with changed fields."""
    layers = {"num_hidden_layers": 2, "first_k_dense_replace": 1}
    by_layer = {"layer_types": None, "mlp_layer_types": None}
    return type(config)(**{**config.to_dict(), **layers, **by_layer, **changed})


def sparse_config(count: int, **changed: Any) -> PretrainedConfig:
    """A config with an index that chooses `count` positions."""
    config = deepseek_v32(random.Random(0))
    return rebuilt(config, index_topk=count, **changed)


def test_an_index_that_chooses_everything_is_dense_attention(tmp_path: Path) -> None:
    """V3.2's weights under V3's name: the indexer's tensors are not read."""
    config = sparse_config(len(PROMPT))
    folder = save_random(tmp_path, config, 0)
    sparse, raw = logits(folder), json.loads((folder / "config.json").read_text())
    raw["architectures"] = ["DeepseekV3ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(raw))
    assert difference(logits(folder), sparse) < 1e-12


def test_an_index_that_chooses_less_is_not(tmp_path: Path) -> None:
    found = [
        logits(save_random(tmp_path / str(count), sparse_config(count), 0))
        for count in (len(PROMPT), 7)
    ]
    assert difference(found[0][:7], found[1][:7]) < 1e-12, "seven positions are all there are"
    assert difference(found[0], found[1]) > 1e-2


def test_bfloat16_is_as_near_the_truth_as_transformers_is(tmp_path: Path) -> None:
    """Without experts or a choice of positions, where rounding would change the choice."""
    config = sparse_config(len(PROMPT), mlp_layer_types=["dense", "dense"])
    folder = save_random(tmp_path, config, 5)
    truth = load_oracle(folder, torch.float64).logits(PROMPT)
    theirs = load_oracle(folder, torch.bfloat16).logits(PROMPT)
    assert spread(logits(folder, "bfloat16") - truth) < 1.2 * spread(theirs - truth)


def spread(difference: Tensor) -> float:
    return float(difference.double().square().mean().sqrt())


def test_experts_in_one_tensor_are_those_with_tensors_of_their_own(tmp_path: Path) -> None:
    config = deepseek_v3(random.Random(2))
    folder = save_random(tmp_path, rebuilt(config), 1)
    before, tensors = logits(folder), load_file(folder / "model.safetensors")
    layers = {name.split(".experts.")[0] for name in tensors if ".experts.0." in name}
    assert layers, "transformers writes each expert's own tensors"
    for layer in layers:
        experts = sum(f"{layer}.experts.{i}.down_proj.weight" in tensors for i in range(99))
        parts = {
            name: [tensors.pop(f"{layer}.experts.{i}.{name}.weight") for i in range(experts)]
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        gate_ups = zip(parts["gate_proj"], parts["up_proj"], strict=True)
        tensors[f"{layer}.experts.gate_up_proj"] = torch.stack([*map(torch.cat, gate_ups)])
        tensors[f"{layer}.experts.down_proj"] = torch.stack(parts["down_proj"])
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(logits(folder), before)


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weight in 8 bits, and the scale of each block, by a loop over the blocks."""
    rows, columns = (-(-length // BLOCK_LEN) for length in weight.shape)
    bits, scales = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            block = (
                slice(i * BLOCK_LEN, (i + 1) * BLOCK_LEN),
                slice(j * BLOCK_LEN, (j + 1) * BLOCK_LEN),
            )
            scales[i, j] = weight[block].abs().max() / 448
            bits[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
    return bits, scales


def widened(bits: Tensor, scales: Tensor) -> Tensor:
    """The weights from 8 bits and scales, by a loop over the blocks."""
    found = bits.double()
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            rows = slice(i * BLOCK_LEN, (i + 1) * BLOCK_LEN)
            found[rows, j * BLOCK_LEN : (j + 1) * BLOCK_LEN] *= scales[i, j].double()
    return found


def test_a_folder_in_8_bits_is_the_folder_of_the_numbers_it_stands_for(tmp_path: Path) -> None:
    """Blocks are cut off at both edges; transformers reads the plain folder."""
    config = sparse_config(16, hidden_size=140, intermediate_size=300)
    plain, folder = save_random(tmp_path / "plain", config, 4), tmp_path / "fp8"
    folder.mkdir()
    tensors, wide = load_file(plain / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        wide[name] = tensor.double()
        if name.endswith("_proj.weight") and "weights_proj" not in name:
            tensors[name], tensors[f"{name}_scale_inv"] = quantised(tensor)
            wide[name] = widened(tensors[name], tensors[f"{name}_scale_inv"])
    assert any(min(t.shape) > 1 for n, t in tensors.items() if n.endswith("_scale_inv"))
    save_file(tensors, folder / "model.safetensors")
    save_file(wide, plain / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((plain / "config.json").read_text())
    raw["quantization_config"] = PUBLISHED["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    found = logits(folder)
    assert difference(found, load_oracle(plain, torch.float64).logits(PROMPT)) < 1e-12


@pytest.mark.skipif(not reads_panels(torch.float32), reason="there is no AVX-512")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(3, 10, 20), (16, 128, 512)], ids=str)
def test_a_product_by_head_does_not_depend_on_the_number_of_tokens(
    sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    heads, in_dim, out_dim = sizes
    rows, weights = torch.randn(130, heads, in_dim), torch.randn(heads, out_dim, in_dim)
    rows, weights = rows.to(dtype), weights.to(dtype)
    multiply = head_products(weights)
    whole = multiply(rows)
    exact = torch.einsum("thi,hoi->tho", rows.double(), weights.double())
    tolerance = 2.0**-8 if dtype is torch.bfloat16 else 1e-6
    assert (whole.double() - exact).abs().max() <= tolerance * exact.abs().max()
    for count in (1, 2, 3, 17, 64):
        assert torch.equal(multiply(rows[:count]), whole[:count])
        assert torch.equal(multiply(rows[-count:]), whole[-count:])
