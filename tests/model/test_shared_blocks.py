"""Zamba2's few transformer blocks serve many layers, each with adapters and pages of its own.

Float64 alone: in so deep a stack without residual paths float32 is no oracle, here or in
transformers.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from tests.model.differences import difference
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.families.zamba2 import zamba2
from tests.model.paged_run import PagedRun
from tests.model.ragged import ragged_logits, random_prompt
from tests.oracle import load_oracle
from tests.tiny_models import save_random

from ferryman.cache.manifest import Kind
from ferryman.errors import ConfigError
from ferryman.model.config import load_config
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model

LAYERS = ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid", "hybrid", "hybrid"]


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
@pytest.mark.parametrize("has_adapters", [True, False], ids=["adapters", "no adapters"])
def test_five_layers_share_a_few_blocks(
    num_blocks: int, has_adapters: bool, tmp_path: Path
) -> None:
    rng = random.Random(7)
    config = zamba2(rng)
    config.layers_block_type, config.num_hidden_layers = LAYERS, len(LAYERS)
    config.hybrid_layer_ids = [i for i, word in enumerate(LAYERS) if word == "hybrid"]
    config.num_mem_blocks, config.use_shared_attention_adapter = num_blocks, has_adapters
    folder = save_random(tmp_path, config, 7)
    prompts = [random_prompt(rng, length, VOCAB_SIZE) for length in (50, 71)]
    model = load_model(folder, LoadOptions("float64", page_size=16))
    oracle = load_oracle(folder, torch.float64)
    for found, prompt in zip(ragged_logits(PagedRun(model), prompts, rng), prompts, strict=True):
        assert difference(found, oracle.logits(prompt)) < 1e-11
    full = model.manifest.layout(Kind.FULL)
    assert full.layers == tuple(config.hybrid_layer_ids), "each use keeps pages of its own"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tie_word_embeddings", False),
        ("use_long_context", True),
        ("hidden_act", "silu"),
        ("num_key_value_heads", 1),
        ("layers_block_type", ["hybrid"]),
        ("mamba_headdim", 3),
    ],
)
def test_fields_that_zamba2_does_not_support_are_refused_by_name(
    field: str, value: object, tmp_path: Path
) -> None:
    raw = zamba2(random.Random(7)).to_dict()
    raw |= {"architectures": ["Zamba2ForCausalLM"]}
    raw |= {"num_attention_heads": 6, "num_key_value_heads": 6}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw | {field: value}))
    with pytest.raises(ConfigError, match=field):
        load_config(tmp_path)
