"""A tiny gpt-oss with its experts in MXFP4, and its twin, dequantised by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tests.tiny_models import save_random
from torch import Tensor
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

CONFIG = GptOssConfig(
    vocab_size=61,
    hidden_size=64,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=8,
    num_local_experts=3,
    num_experts_per_tok=2,
    sliding_window=9,
    eos_token_id=2,
)


def random_blocks(
    rows: int, blocks: int, low: int, high: int, experts: int = 3
) -> tuple[Tensor, Tensor]:
    """Codes [experts, rows, blocks, 16] and scales [experts, rows, blocks], the scales from `low`
    to `high`."""
    codes = torch.randint(0, 256, (experts, rows, blocks, 16), dtype=torch.uint8)
    return codes, torch.randint(low, high, (experts, rows, blocks), dtype=torch.uint8)


def save_mxfp4(path: Path, config: GptOssConfig = CONFIG) -> tuple[Path, Path]:
    """Two folders of one model below `path`: the experts dequantised, and in MXFP4 as published.

    Codes are drawn from torch's generator.
    """
    plain = save_random(path / "plain", config, 0)
    tensors, packed = load_file(plain / "model.safetensors"), dict[str, Tensor]()
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors[name].shape
        blocks, scales = random_blocks(rows, columns // 32, 121, 125, experts)
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    others = {name: t for name, t in tensors.items() if f"{name}_blocks" not in packed}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    quantised = path / "quantised"
    quantised.mkdir()
    save_file({**others, **packed}, quantised / "model.safetensors", {"format": "pt"})
    raw = json.loads((plain / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (quantised / "config.json").write_text(json.dumps(raw))
    return plain, quantised
