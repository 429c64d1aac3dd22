"""Transformers with experts in most layers: OLMoE, MiniMax-M2, Hunyuan, ERNIE 4.5, Phi-3.5-MoE.

source   conversion/olmo.py, minimax.py, hunyuan.py, ernie.py, phi.py and src/models/ of llama.cpp
"""

from __future__ import annotations

from ferryman.gguf.architectures.centred_norms import CENTRED_ENDS, phi3_fields, with_biases
from ferryman.gguf.architectures.config_fields import (
    Fields,
    any_has,
    attention_fields,
    expert_fields,
    inner_dim,
    trunk_fields,
)
from ferryman.gguf.architectures.tensor_names import (
    ATTENTION,
    ENDS,
    NORMS,
    TensorNames,
    expert_names,
    mlp_names,
)
from ferryman.gguf.architectures.transformer import MIXTRAL_EXPERTS, dense_fields
from ferryman.gguf.model_file import GgufFile

_EXPERT_WIDTH = "{arch}.expert_feed_forward_length"
PHIMOE_GROWTH = 1.243163121016122
"""`short_mscale` and `long_mscale` of Phi-3.5-MoE-instruct."""
_ERNIE_BIAS = "mlp.moe_statics.e_score_correction_bias"


def olmoe_names(model: GgufFile) -> TensorNames:
    return TensorNames(ENDS, {**NORMS, **ATTENTION, **expert_names()})


def olmoe_fields(model: GgufFile) -> Fields:
    """The shares of a token's experts do not sum to 1, in llama.cpp as well."""
    return {
        **dense_fields(model, "OlmoeForCausalLM"),
        **expert_fields(model),
        "norm_topk_prob": False,
    }


def minimax_m2_names(model: GgufFile) -> TensorNames:
    bias = {"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"}
    return TensorNames(ENDS, {**NORMS, **ATTENTION, **MIXTRAL_EXPERTS, **bias})


def minimax_m2_fields(model: GgufFile) -> Fields:
    return {
        "architectures": ["MiniMaxM2ForCausalLM"],
        **trunk_fields(model),
        **attention_fields(model),
        **expert_fields(model, count="num_local_experts"),
        "intermediate_size": model.metadata.whole(_EXPERT_WIDTH),
    }


def phimoe_names(model: GgufFile) -> TensorNames:
    """Norms, products and the head have biases."""
    ends = {**CENTRED_ENDS, "output.bias": "lm_head.bias"}
    return TensorNames(ends, {**with_biases(NORMS), **ATTENTION, **MIXTRAL_EXPERTS})


def phimoe_fields(model: GgufFile) -> Fields:
    """Waves have factors as in Phi 3. q and k grow by a number that a file does not have: a
    converter writes that of Phi 3's formula, which is another."""
    fields = phi3_fields(model)
    if "rope_scaling" in fields:
        growth = {"short_mscale": PHIMOE_GROWTH, "long_mscale": PHIMOE_GROWTH}
        fields["rope_scaling"] = {**fields["rope_scaling"], **growth}
    return {
        **fields,
        "architectures": ["PhimoeForCausalLM"],
        "attention_bias": any_has(model, "attn_q.bias"),
        "lm_head_bias": "output.bias" in model.tensors,
        **expert_fields(model, count="num_local_experts"),
    }


def hunyuan_moe_names(model: GgufFile) -> TensorNames:
    layer = {
        **NORMS,
        **ATTENTION,
        **expert_names("shared_mlp"),
        "ffn_gate_inp.weight": "mlp.gate.wg.weight",
        "attn_q_norm.weight": "self_attn.query_layernorm.weight",
        "attn_k_norm.weight": "self_attn.key_layernorm.weight",
    }
    return TensorNames(ENDS, layer)


def hunyuan_moe_fields(model: GgufFile) -> Fields:
    """Experts are as wide as the shared one. A converter computes the base of the rotations that
    a folder scales by alpha."""
    metadata, width = model.metadata, model.metadata.whole(_EXPERT_WIDTH)
    if metadata.whole("{arch}.expert_shared_feed_forward_length", width) != width:
        key = "{arch}.expert_shared_feed_forward_length"
        raise metadata.refusal(key, f"{width}, as that of an expert")
    experts = expert_fields(model)
    return {
        **dense_fields(model, "HunYuanMoEV1ForCausalLM"),
        "num_experts": experts["num_experts"],
        "moe_topk": experts["num_experts_per_tok"],
        "intermediate_size": width,
    }


def ernie_moe_names(model: GgufFile) -> TensorNames:
    experts = {**expert_names("shared_experts"), "exp_probs_b.bias": _ERNIE_BIAS}
    layer = {**NORMS, **ATTENTION, **mlp_names(), **experts}
    return TensorNames(ENDS, layer, rows=(_ERNIE_BIAS,))


def ernie_moe_fields(model: GgufFile) -> Fields:
    """Heads turn by pairs in the folder, too. Layers without experts stand before the others."""
    metadata, experts = model.metadata, expert_fields(model)
    return {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        **trunk_fields(model),
        **attention_fields(model),
        "use_bias": any_has(model, "attn_output.bias"),
        "intermediate_size": inner_dim(model),
        "moe_num_experts": experts["num_experts"],
        "moe_k": experts["num_experts_per_tok"],
        "moe_intermediate_size": metadata.whole(_EXPERT_WIDTH),
        "moe_num_shared_experts": metadata.whole("{arch}.expert_shared_count", 0),
        "moe_layer_interval": metadata.whole("{arch}.interleave_moe_layer_step", 1),
        "moe_layer_start_index": metadata.whole("{arch}.leading_dense_block_count", 0),
    }
