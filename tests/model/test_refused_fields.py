"""Fields that ask for other layers than a family has are refused by name, never read past."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.model.comparison import architecture_of, random_config

from ferryman.errors import ConfigError
from ferryman.model.config import load_config

SWITCHED = [
    ("laguna", {"moe_router_score_func": "sqrtsoftplus"}),
    ("laguna", {"moe_router_use_sigmoid": False}),
    ("laguna", {"moe_router_logit_softcapping": 30.0}),
    ("laguna", {"gating": False}),
    ("laguna", {"num_attention_heads_per_layer": [2] * 9}),
    ("cohere2_moe", {"rms_norm_eps": 1e-5}),
    ("cohere2_moe", {"expert_selection_fn": "tanh"}),
    ("cohere2_moe", {"shared_expert_combination_strategy": "product"}),
    ("hunyuan_moe", {"moe_topk": [1, 2, 1, 2]}),
    ("hunyuan_moe", {"num_shared_expert": 2}),
    ("minimax_m2", {"attn_type_list": [0, 1]}),
    ("minimax_m2", {"qk_norm_type": "per_head"}),
    ("mimo_v2_flash", {"swa_v_head_dim": 5}),
    ("mimo_v2_flash", {"v_head_dim": 64}),
    ("mimo_v2_flash", {"hybrid_layer_pattern": [2]}),
    ("afmoe", {"score_func": "softmax"}),
    ("phi", {"qk_layernorm": True}),
    ("gemma", {"hidden_activation": "relu"}),
    ("granite_swa", {"layer_rope_theta": [1.0]}),
    ("granite", {"position_embedding_type": "alibi"}),
    ("xlstm", {"use_bias": True}),
    ("xlstm", {"add_out_norm": False}),
    ("xlstm", {"tie_word_embeddings": True}),
    ("xlstm", {"weight_mode": "fused"}),
    ("xlstm", {"inference_state_dtype": "bfloat16"}),
    ("xlstm", {"embedding_dim": 1000}),
    ("xlstm", {"num_blocks": 1000}),
    ("xlstm", {"qk_dim_factor": 0.01}),
    ("bailing_hybrid", {"kda_lower_bound": 5.0}),
    ("bailing_hybrid", {"q_lora_rank": 6}),
    ("ling_25", {"use_qk_norm": False}),
    ("ling_25", {"use_qkv_bias": True}),
    ("ling_25", {"use_bias": True}),
    ("ling_25", {"attention_bias": True}),
    ("ling_25", {"use_mla_nope": True}),
    ("ling_25", {"full_attention_type": "gqa"}),
    ("ling_25", {"router_dtype": "bf16"}),
    ("ling_25", {"head_dim": None}),
    ("ling_25", {"num_shared_experts": None}),
    ("ling_25", {"linear_silu": True}),
    ("ling_25", {"use_linear_silu": True}),
    ("ling_25", {"linear_rope": False}),
    ("ling_25", {"rope_interleave": False}),
    ("ling_25", {"norm_head": True}),
    ("ling_25", {"moe_router_enable_routed_scaling": False}),
    ("ling_25", {"moe_router_enable_shared_expert": False}),
    ("ling_25", {"tie_word_embeddings": True}),
    ("ling_25", {"moe_shared_expert_intermediate_size": 7}),
    ("ling_25", {"num_kv_heads_for_linear_attn": 99}),
    ("ling_25", {"rotary_dim": 2}),
    ("ling_25", {"group_norm_size": 7}),
    ("ling_25", {"layer_group_size": 7}),
    ("ling_25", {"rms_norm_eps": 1e-5}),
    ("ling_25", {"score_function": "softmax"}),
    ("ling_25", {"scoring_func": "softmax"}),
    ("ling_25", {"topk_method": "greedy"}),
    ("ling_25", {"norm_topk_prob": False}),
    ("ling_25", {"moe_router_enable_expert_bias": False}),
    ("ling_25", {"num_experts_per_tok": 1}),
    ("jetmoe", {"num_attention_heads": 7}),
    ("jetmoe", {"activation_function": "gelu"}),
    ("step3p7", {"yarn_only_types": ["sliding_attention"]}),
    ("step3p7", {"use_head_wise_attn_gate": False}),
    ("step3p7", {"moe_router_activation": "softmax"}),
    ("step3p7", {"zero_centered": False}),
    ("step3p7", {"swiglu_limits": [1.0] * 9}),
    ("step3p7", {"swiglu_limits": "7"}),
    ("step3p7", {"layer_types": ["linear_attention"]}),
    ("step3p7", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    ("longcat_flash", {"zero_expert_type": "copy"}),
    ("longcat_flash", {"attention_method": "MHA"}),
    ("longcat_flash", {"router_bias": True}),
    ("longcat_flash", {"norm_topk_prob": True}),
    ("longcat_flash", {"mla_scale_kv_lora": False}),
    ("longcat_flash", {"num_hidden_layers": 9}),
    ("longcat_flash", {"q_lora_rank": None}),
    ("longcat_flash", {"moe_topk": 99}),
    ("zaya", {"num_experts_per_tok": 2}),
    ("zaya", {"hidden_act": "gelu"}),
    ("zaya", {"cca": True}),
    ("hy_v4", {"enable_ihc": False}),
    ("hy_v4", {"gated_mla": False}),
    ("hy_v4", {"learnable_sink": False}),
    ("hy_v4", {"gating_type": "headwise"}),
    ("hy_v4", {"enable_lm_head_fp32": False}),
    ("hy_v4", {"layer_types": ["full_attention"] * 4}),
    ("hy_v4", {"indexer_types": ["shared"] * 4}),
    ("hy_v4", {"q_lora_rank": None}),
    ("hy_v4", {"index_head_dim": 1}),
    ("hy_v4", {"hc_mult": 0}),
    ("hy_v4", {"swiglu_limit": 0.0}),
    ("qwen4_exp", {"output_gate_type": "softplus"}),
    ("qwen4_exp", {"hidden_act": "gelu"}),
    ("qwen4_exp", {"hc_count": 1}),
    ("qwen4_exp", {"layer_types": ["sliding_attention"] * 4}),
    ("qwen4_exp", {"indexer_kv_heads": 2}),
    ("qwen4_exp", {"indexer_n_heads": None}),
    ("qwen4_exp", {"indexer_budget": 31}),
    ("qwen4_exp", {"indexer_head_dim": 2}),
    ("qwen4_exp", {"ple_layer_ids": [4]}),
    ("qwen4_exp", {"ple_layer_ids": [0]}),
    ("qwen4_exp", {"ple_embed_dim": 7}),
    ("qwen4_exp", {"ple_conv_kernel_size": 1}),
    ("qwen4_exp", {"ngram_size": 1}),
    ("qwen4_exp", {"eos_token_id": None}),
    ("qwen4_exp", {"vocab_size": 1 << 25}),
    ("deepseek_v4", {"scoring_func": "softmax"}),
    ("deepseek_v4", {"topk_method": "greedy"}),
    ("deepseek_v4", {"norm_topk_prob": False}),
    ("deepseek_v4", {"num_key_value_heads": 2}),
    ("deepseek_v4", {"n_shared_experts": 2}),
    ("deepseek_v4", {"attention_bias": True}),
    ("deepseek_v4", {"hidden_act": "gelu"}),
    ("deepseek_v4", {"expert_dtype": "int4"}),
    ("deepseek_v4", {"layer_types": ["full_attention"] * 4}),
    ("deepseek_v4", {"mlp_layer_types": ["sparse"] * 4}),
    ("deepseek_v4", {"compress_ratios": [8], "layer_types": None}),
    ("deepseek_v4", {"num_experts_per_tok": 99}),
    ("deepseek_v4", {"o_groups": 5}),
    ("deepseek_v4", {"hc_sinkhorn_iters": 0}),
    ("deepseek_v4", {"hc_eps": 0.0}),
    ("deepseek_v4", {"swiglu_limit": 0.0}),
    ("inkling", {"shared_expert_sink": False}),
    ("inkling", {"use_sconv": False}),
    ("inkling", {"gate_activation": "softmax"}),
    ("inkling", {"final_logit_softcapping": 30.0}),
    ("inkling", {"swa_num_key_value_heads": 7}),
]


@pytest.mark.parametrize(
    ("family", "switch"), SWITCHED, ids=[f"{family} {switch}" for family, switch in SWITCHED]
)
def test_a_field_of_other_layers_is_refused_by_name(
    family: str, switch: dict[str, Any], tmp_path: Path
) -> None:
    assert f"field '{next(iter(switch))}'" in refusal_of(family, switch, tmp_path)


def refusal_of(family: str, switch: dict[str, Any], folder: Path) -> str:
    """The error for a config of `family`, which is read without `switch` and not with it."""
    config = random_config(family, 1)
    config.architectures = [architecture_of(config)]
    config.save_pretrained(folder)
    load_config(folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **switch}))
    with pytest.raises(ConfigError) as refusal:
        load_config(folder)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("switch", "expected"),
    [
        ({"ple_layer_ids": ["a"]}, "a list of whole numbers from 0 on"),
        ({"ple_layer_ids": [-1]}, "a list of whole numbers from 0 on"),
        ({"ple_layer_ids": "2"}, "a list of whole numbers from 0 on"),
        ({"eos_token_id": ["a"]}, "a token id or a list of them"),
    ],
    ids=str,
)
def test_a_list_of_other_things_is_refused_by_what_it_lists(
    switch: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    assert f"must be {expected}; it is" in refusal_of("qwen4_exp", switch, tmp_path)
