from __future__ import annotations

import random

from tests.model.families.deepseek import deepseek_fields
from transformers import LongcatFlashConfig, PretrainedConfig

SHARED = (
    "attention_bias",
    "kv_lora_rank",
    "max_position_embeddings",
    "num_attention_heads",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "v_head_dim",
    "vocab_size",
)


def longcat_flash(rng: random.Random) -> PretrainedConfig:
    """In some models a token may choose identities alone; others have none."""
    fields = deepseek_fields(rng)
    experts, identities = rng.choice([2, 3, 5]), rng.choice([0, 1, 4])
    return LongcatFlashConfig(
        **{name: fields[name] for name in SHARED},
        hidden_size=rng.choice([24, 40, 64]),
        num_layers=rng.randint(1, 3),
        head_dim=fields["qk_rope_head_dim"],
        ffn_hidden_size=rng.choice([32, 56]),
        q_lora_rank=rng.choice([6, 20]),
        expert_ffn_hidden_size=rng.choice([8, 24]),
        n_routed_experts=experts,
        zero_expert_num=identities,
        # transformers fails where a token goes to one expert.
        moe_topk=rng.randint(2, min(4, experts + identities)),
        routed_scaling_factor=rng.uniform(0.5, 6.0),
        pad_token_id=None,
        bos_token_id=1,
        eos_token_id=2,
    )
