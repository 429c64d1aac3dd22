from __future__ import annotations

import random
from typing import Any

from tests.model.families.deepseek import deepseek_fields
from tests.model.families.shapes import MLP_TYPES, pattern, window_len
from transformers import PretrainedConfig
from transformers.models.dots3_note import Dots3NoteTextConfig

LAYER_TYPES = ["sliding_attention", "indexed_attention", "full_attention"]


def dots3_note(rng: random.Random) -> PretrainedConfig:
    """The index chooses few, most or all of a prompt's positions; windows have sizes of their
    own."""
    fields = deepseek_fields(rng)
    num_layers = fields["num_hidden_layers"]
    fields |= {
        "num_local_experts": fields.pop("n_routed_experts"),
        "layer_types": (words := pattern(rng, num_layers, LAYER_TYPES)),
        "mlp_layer_types": pattern(rng, num_layers, MLP_TYPES),
        "rope_parameters": {
            word: {"rope_type": "default", "rope_theta": rng.choice([1e2, 1e4])}
            for word in sorted(set(words))
        },
    }
    del fields["first_k_dense_replace"]
    windows = _sizes(rng)
    return Dots3NoteTextConfig(
        **fields,
        q_lora_rank=rng.choice([6, 20]),
        head_dim=fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"],
        shared_experts_intermediate_size=rng.choice([8, 20]),
        sliding_window=window_len(rng),
        index_n_heads=rng.choice([1, 3, 8]),
        index_head_dim=rng.choice([6, 12]),
        index_topk=rng.choice([1, 5, 16, 40, 200]),
        per_layer_config={
            layer: windows for layer, word in enumerate(words) if word == "sliding_attention"
        },
    )


def _sizes(rng: random.Random) -> dict[str, Any]:
    """The sizes of layers with windows."""
    q_heads, plain_dim, rope_dim = rng.choice([1, 2, 3]), rng.choice([3, 5]), rng.choice([2, 4])
    return {
        "num_attention_heads": q_heads,
        "num_key_value_heads": q_heads,
        "q_lora_rank": rng.choice([5, 12]),
        "kv_lora_rank": rng.choice([7, 16]),
        "head_dim": plain_dim + rope_dim,
        "qk_nope_head_dim": plain_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": rng.choice([3, 6]),
    }
