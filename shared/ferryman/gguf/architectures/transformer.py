"""Transformers: Llama, Mistral, Mixtral, SmolLM 3, Qwen 2 and 3 with and without experts, Gemma,
Seed-OSS, ERNIE 4.5 and Hunyuan, dense.

llama.cpp calls Mistral's models "llama", too. Heads of Qwen and Gemma turn by halves, as in a
folder. Of Gemma 2 and 3 it is the text model: four norms a layer, and windows in some layers.
"""

from __future__ import annotations

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
from ferryman.gguf.model_file import GgufFile

MIXTRAL_EXPERTS = {
    "ffn_gate_inp.weight": "block_sparse_moe.gate.weight",
    "ffn_gate_exps.weight": "block_sparse_moe.experts.{}.w1.weight",
    "ffn_up_exps.weight": "block_sparse_moe.experts.{}.w3.weight",
    "ffn_down_exps.weight": "block_sparse_moe.experts.{}.w2.weight",
}
SHARED_GATE = "mlp.shared_expert_gate.weight"
_LAYER = {**NORMS, **ATTENTION}
GEMMA_NORMS = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_WIDE_SCALE = {"gemma2": 46, "gemma3": 62}
"""The number of layers of the models of 27B, whose scores are divided by √(hidden size / heads),
which no key of the file says (llama.cpp, src/llama-model.cpp)."""


def plain_names(model: GgufFile) -> TensorNames:
    """Attention and a gated MLP, whose heads turn by halves."""
    return TensorNames(ENDS, {**_LAYER, **mlp_names()})


def paired_names(model: GgufFile) -> TensorNames:
    """The same with heads that turn by pairs."""
    return TensorNames(ENDS, {**_LAYER, **mlp_names()}, pairs_rows=True)


def llama_names(model: GgufFile) -> TensorNames:
    layer = {**_LAYER, **mlp_names(), **MIXTRAL_EXPERTS}
    return TensorNames(ENDS, layer, pairs_rows=True)


def qwen2_moe_names(model: GgufFile) -> TensorNames:
    shared = {"ffn_gate_inp_shexp.weight": SHARED_GATE}
    layer = {**_LAYER, **expert_names("shared_expert"), **shared}
    return TensorNames(ENDS, layer, rows=(SHARED_GATE,))


def qwen3_moe_names(model: GgufFile) -> TensorNames:
    return TensorNames(ENDS, {**_LAYER, **expert_names()})


def dense_fields(model: GgufFile, architecture: str) -> Fields:
    """A transformer with a gated MLP in every layer."""
    return {
        "architectures": [architecture],
        **trunk_fields(model),
        **attention_fields(model),
        "intermediate_size": inner_dim(model),
        "mlp_bias": "blk.0.ffn_gate.bias" in model.tensors,
    }


def llama_fields(model: GgufFile) -> Fields:
    """Llama and Mistral, or Mixtral if there are experts."""
    if not model.metadata.whole("{arch}.expert_count", 0):
        return dense_fields(model, "LlamaForCausalLM")
    experts = expert_fields(model, count="num_local_experts")
    return {**dense_fields(model, "MixtralForCausalLM"), **experts}


def smollm3_fields(model: GgufFile) -> Fields:
    """Every fourth layer has no positions, in llama.cpp as well."""
    return {**dense_fields(model, "SmolLM3ForCausalLM"), "no_rope_layer_interval": 4}


def qwen2_fields(model: GgufFile) -> Fields:
    return dense_fields(model, "Qwen2ForCausalLM")


def qwen3_fields(model: GgufFile) -> Fields:
    return dense_fields(model, "Qwen3ForCausalLM")


def qwen2_moe_fields(model: GgufFile) -> Fields:
    """The shares of a token's experts do not sum to 1."""
    metadata = model.metadata
    return {
        **dense_fields(model, "Qwen2MoeForCausalLM"),
        **expert_fields(model),
        "moe_intermediate_size": metadata.whole("{arch}.expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.whole(
            "{arch}.expert_shared_feed_forward_length"
        ),
        "norm_topk_prob": False,
    }


def qwen3_moe_fields(model: GgufFile) -> Fields:
    """The shares of a token's experts sum to 1, as llama.cpp computes them."""
    return {
        **dense_fields(model, "Qwen3MoeForCausalLM"),
        **expert_fields(model),
        "moe_intermediate_size": model.metadata.whole("{arch}.expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def seed_oss_names(model: GgufFile) -> TensorNames:
    layer = {
        "attn_norm.weight": "input_layernorm.weight",
        "post_attention_norm.weight": "post_attention_layernorm.weight",
    }
    return TensorNames(ENDS, {**layer, **ATTENTION, **mlp_names()})


def seed_oss_fields(model: GgufFile) -> Fields:
    return {
        **dense_fields(model, "SeedOssForCausalLM"),
        "attention_out_bias": any_has(model, "attn_output.bias"),
    }


def ernie_fields(model: GgufFile) -> Fields:
    """Heads turn by pairs in the folder, too."""
    has_bias = any_has(model, "attn_output.bias")
    return {**dense_fields(model, "Ernie4_5ForCausalLM"), "use_bias": has_bias}


def hunyuan_names(model: GgufFile) -> TensorNames:
    norms = {
        "attn_q_norm.weight": "self_attn.query_layernorm.weight",
        "attn_k_norm.weight": "self_attn.key_layernorm.weight",
    }
    return TensorNames(ENDS, {**_LAYER, **mlp_names(), **norms})


def hunyuan_fields(model: GgufFile) -> Fields:
    """A converter computes the base of the rotations that a folder scales by alpha."""
    return dense_fields(model, "HunYuanDenseV1ForCausalLM")


def gemma_names(model: GgufFile) -> TensorNames:
    return TensorNames(ENDS, {**GEMMA_NORMS, **ATTENTION, **mlp_names()}, norms_around_one=True)


def gemma1_names(model: GgufFile) -> TensorNames:
    return TensorNames(ENDS, {**_LAYER, **mlp_names()}, norms_around_one=True)


def gemma1_fields(model: GgufFile) -> Fields:
    activation = {"hidden_activation": "gelu_pytorch_tanh"}
    return {**dense_fields(model, "GemmaForCausalLM"), **activation}


def gemma2_fields(model: GgufFile) -> Fields:
    metadata = model.metadata
    return {
        **_gemma_fields(model, "Gemma2ForCausalLM"),
        "attn_logit_softcapping": metadata.number("{arch}.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("{arch}.final_logit_softcapping", 30.0),
    }


def gemma3_fields(model: GgufFile) -> Fields:
    return {
        **_gemma_fields(model, "Gemma3ForCausalLM"),
        "rope_local_base_freq": model.metadata.number("{arch}.rope.freq_base_swa", 10_000.0),
        "sliding_window_pattern": 6,
    }


def _gemma_fields(model: GgufFile, architecture: str) -> Fields:
    metadata, fields = model.metadata, dense_fields(model, architecture)
    is_wide = _WIDE_SCALE[metadata.architecture] == fields["num_hidden_layers"]
    by_width = fields["hidden_size"] // fields["num_attention_heads"]
    return {
        **fields,
        "query_pre_attn_scalar": by_width if is_wide else fields["head_dim"],
        "sliding_window": metadata.whole("{arch}.attention.sliding_window"),
        "hidden_activation": "gelu_pytorch_tanh",
    }
