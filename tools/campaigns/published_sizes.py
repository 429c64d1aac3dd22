"""Models of published sizes, with random weights in bfloat16, and prompts for them."""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

_GRANITE: Mapping[str, Any] = {
    "model_type": "granitemoehybrid",
    "vocab_size": 100_352,
    "num_hidden_layers": 40,
    "position_embedding_type": "nope",
    "max_position_embeddings": 131_072,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "tie_word_embeddings": False,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_MICRO: Mapping[str, Any] = {
    **_GRANITE,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "intermediate_size": 8192,
    "shared_intermediate_size": 8192,
    "mamba_n_heads": 64,
    "attention_multiplier": 0.015625,
    "logits_scaling": 8.0,
}
NARROW = "granite-4.0-h-narrow"
"""Micro's first layers, an eighth as wide, with few words: for runs that show that they run."""
SIZES: Mapping[str, Mapping[str, Any]] = {
    "granite-4.0-h-micro": _MICRO,
    NARROW: {
        **_MICRO,
        "vocab_size": 4096,
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "intermediate_size": 1024,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 8,
    },
    "granite-4.0-h-tiny": {
        **_GRANITE,
        "hidden_size": 1536,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "intermediate_size": 512,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 48,
        "attention_multiplier": 0.0078125,
        "logits_scaling": 6.0,
    },
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "intermediate_size": 5120,
        "max_position_embeddings": 262_144,
        "eos_token_id": None,
    },
}
"""Fields of `config.json`, as published but for NARROW."""

Prompt = list[int]


def prompts_of(lengths: Sequence[int], vocab_size: int = 100_000) -> list[Prompt]:
    return [
        [(7 * i * i + 3 * i + row) % (vocab_size - 3) + 3 for i in range(length)]
        for row, length in enumerate(lengths)
    ]


def config_of(name: str, num_layers: int) -> Any:
    """The config with its first `num_layers` layers, all for 0. Attention comes as published."""
    fields = dict(SIZES[name])
    num_layers = fields["num_hidden_layers"] = num_layers or fields["num_hidden_layers"]
    if fields["model_type"] == "granitemoehybrid":
        fields["layer_types"] = ["attention" if i % 10 == 5 else "mamba" for i in range(num_layers)]
    return transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)


@contextmanager
def saved_model(name: str, num_layers: int, device: str) -> Iterator[tuple[Path, Any]]:
    """A folder with random weights in bfloat16, and the same model of transformers on the device.

    /dev/shm holds it where it is: a disk would be the slowest part of a run.
    """
    config = config_of(name, num_layers)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
        model.save_pretrained(folder)
        yield Path(folder), model.eval()


def forget_memory() -> None:
    """Gives back what torch keeps of a model that is gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def size_parser(about: str | None) -> argparse.ArgumentParser:
    """The choices of both campaigns."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("name", choices=sorted(SIZES))
    parser.add_argument("--layers", type=int, default=0, help="the first ones; 0: all")
    parser.add_argument("--device", default="cuda")
    return parser
