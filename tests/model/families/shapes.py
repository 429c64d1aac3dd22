"""Random tiny shapes, for the random configs of all families."""

from __future__ import annotations

import random
from typing import Any

VOCAB_SIZE = 97
MAX_POSITIONS = 1024
LAYER_TYPES = ["sliding_attention", "full_attention"]
MLP_TYPES = ["dense", "sparse"]


def trunk(rng: random.Random, num_layers: int) -> dict[str, Any]:
    """The fields that every config has."""
    return {
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": num_layers,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": rng.choice([1e-6, 1e-5, 1e-3]),
        "tie_word_embeddings": rng.random() < 0.5,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def grouped_heads(rng: random.Random) -> dict[str, Any]:
    """Odd numbers of heads, in groups of one to three; a head dim that a rotation can halve."""
    kv_heads, group = rng.choice([1, 2, 3, 5]), rng.choice([1, 2, 3])
    return {
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice([4, 6, 16]),
    }


def sizes(rng: random.Random) -> dict[str, Any]:
    """Sizes of hidden states and MLP that no number of heads has to divide."""
    return {"hidden_size": rng.choice([24, 40]), "intermediate_size": rng.choice([32, 56])}


def experts(rng: random.Random) -> dict[str, Any]:
    """Experts by the field names of Qwen."""
    num_experts = rng.choice([3, 5])
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": rng.randint(1, num_experts),
        "moe_intermediate_size": rng.choice([8, 20]),
    }


def experts_in_groups(rng: random.Random, *, count: str) -> dict[str, Any]:
    """Experts in groups by the field names of DeepSeek; `count` is that of their number."""
    num_groups, per_group = rng.choice([1, 2]), rng.choice([2, 3])
    groups_per_token = rng.randint(1, num_groups)
    return {
        count: num_groups * per_group,
        "n_group": num_groups,
        "topk_group": groups_per_token,
        "num_experts_per_tok": rng.randint(1, groups_per_token * per_group),
        "norm_topk_prob": rng.random() < 0.5,
        "routed_scaling_factor": rng.uniform(0.5, 2.5),
        "moe_intermediate_size": rng.choice([8, 20]),
    }


def window_len(rng: random.Random) -> int:
    return rng.choice([1, 2, rng.randint(3, 20), rng.randint(21, 70)])


def pattern(rng: random.Random, num_layers: int, words: list[str]) -> list[str]:
    """A word for each layer; every word occurs if there are enough layers."""
    chosen = words[:num_layers] + [rng.choice(words) for _ in range(num_layers - len(words))]
    return rng.sample(chosen, num_layers)


def rope(rng: random.Random) -> dict[str, Any]:
    """Rope parameters of any supported type, with lengths so short that a ramp is fully used."""
    kind = rng.choice(["default", "linear", "llama3", "yarn"])
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": rng.choice([1e2, 1e4, 150_000.0])}
    if kind != "default":
        found["factor"] = rng.choice([1.5, 4.0, 32.0])
    if kind == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice([2.0, 4.0])}
    if kind == "yarn":
        found |= {"beta_fast": rng.choice([4.0, 32.0]), "beta_slow": 1.0}
        found["truncate"] = rng.random() < 0.5
    if kind in ("llama3", "yarn"):
        found["original_max_position_embeddings"] = rng.choice([16, 64, 300])
    return found


def nested_rope(rng: random.Random) -> dict[str, Any]:
    """The same for layers of one type, without YaRN's `truncate`: transformers looks for it in the
    wrong place."""
    parameters = rope(rng)
    parameters.pop("truncate", None)
    return parameters
