"""Step 3.7: folders as they are published; their words and tensors are not transformers'."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from itertools import count
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
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model

RENAMED = (
    ("mlp.gate.weight", "moe.gate.weight"),
    ("mlp.gate.e_score_correction_bias", "moe.router_bias"),
    ("mlp.experts.down_proj", "moe.down_proj.weight"),
    ("mlp.shared_experts.", "share_expert."),
)
WORDS = {
    "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
    "num_key_value_heads": "num_attention_groups",
}
LIMITS = [0.0, 0.25]


def published_tensors(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        if name.endswith("mlp.experts.gate_up_proj"):
            for word, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                published = name.replace("mlp.experts.gate_up_proj", f"moe.{word}_proj.weight")
                yield published, half.contiguous()
            continue
        for old, new in RENAMED:
            name = name.replace(old, new)
        yield name, tensor


def published_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """A config whose lists have entries of two drafting layers behind those of the layers."""
    words, sparse = raw.pop("layer_types"), raw.pop("mlp_layer_types")
    ropes = raw.pop("rope_parameters")
    padded = [*words, "full_attention", "sliding_attention"]
    text = {WORDS.get(name, name): value for name, value in raw.items()}
    text |= {
        "num_nextn_predict_layers": 2,
        "layer_types": padded,
        "moe_layers_enum": ",".join(str(i) for i, word in enumerate(sparse) if word == "sparse"),
        "attention_other_setting": {"num_attention_heads": text.pop("num_sliding_attention_heads")},
        "rope_theta": [ropes[word]["rope_theta"] for word in padded],
        "partial_rotary_factors": [ropes[word]["partial_rotary_factor"] for word in padded],
        "rope_scaling": ropes["full_attention"],
        "yarn_only_types": ["full_attention"],
        "use_qk_norm": True,
    }
    for name in ("swiglu_limits", "swiglu_limits_shared"):
        text[name] = [limit or 0.0 for limit in text[name]] + [0.0, 0.0]
    ends = {name: text.pop(name) for name in ("bos_token_id", "eos_token_id")}
    return {"architectures": ["Step3p7ForConditionalGeneration"], **ends, "text_config": text}


def logits(folder: Path) -> Tensor:
    run = PagedRun(load_model(folder, LoadOptions("float32", page_size=16)), 1)
    prompt = random_prompt(random.Random(1), 40, VOCAB_SIZE)
    (found,) = run.prefill([Part(run.start(), prompt)])
    return found


def _has_all_parts(seed: int) -> bool:
    """Dense and sparse layers, in windows or not, and waves that differ between the two."""
    config = random_config("step3p7", seed)
    ropes = config.rope_parameters
    return (
        len(set(config.layer_types)) == len(set(config.mlp_layer_types)) == len(ropes) == 2
        and ropes["sliding_attention"]["rope_type"] == "default"
        and config.num_hidden_layers >= 3
    )


def test_a_folder_as_it_is_published_is_the_model_that_transformers_writes(tmp_path: Path) -> None:
    seed = next(seed for seed in count() if _has_all_parts(seed))
    config = random_config("step3p7", seed)
    config.swiglu_limits = [LIMITS[i % 2] for i in range(config.num_hidden_layers)]
    config.swiglu_limits_shared = config.swiglu_limits[::-1]
    save_random(tmp_path, config, seed)
    expected, read = logits(tmp_path), load_config(tmp_path)
    tensors = dict(published_tensors(load_file(tmp_path / "model.safetensors")))
    assert any(".moe.up_proj.weight" in name for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(published_fields(raw)))
    assert load_config(tmp_path) == read
    assert torch.equal(logits(tmp_path), expected)


PUBLISHED = Path(__file__).parent / "published" / "stepfun-ai--Step-3.7-Flash.json"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("yarn_only_types", []),
        ("yarn_only_types", None),
        ("moe_router_activation", ""),
        ("moe_every_n_layer", 0),
        ("moe_layers_enum", "3-44"),
        ("moe_layers_enum", "3,4,+5"),
    ],
)
def test_what_the_layers_do_not_compute_is_refused_by_its_name(
    field: str, value: object, tmp_path: Path
) -> None:
    raw = json.loads(PUBLISHED.read_text())["config"]
    raw["text_config"][field] = value
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=field):
        load_config(tmp_path)


FLAT = {
    "architectures": ["Step3p7FlashForCausalLM"],
    "model_type": "step3p7",
    "num_hidden_layers": 5,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128896,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 1,
    "intermediate_size": 11264,
    "sliding_window": 512,
    "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
    "n_routed_experts": 288,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
    "moe_router_scaling_factor": 3.0,
}
"""As aiconfigurator has it: without waves, heads of windows, and layers with experts."""


@pytest.mark.parametrize(
    ("known", "missing"),
    [
        ({}, "rope_theta"),
        ({"rope_theta": 1e4}, "num_attention_heads"),
        ({"rope_theta": 1e4, "num_sliding_attention_heads": 96}, "moe_layers_enum"),
    ],
)
def test_what_differs_by_layer_has_no_default(
    known: dict[str, Any], missing: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**FLAT, **known}))
    with pytest.raises(ConfigError, match=f"'{missing}'"):
        load_config(tmp_path)
