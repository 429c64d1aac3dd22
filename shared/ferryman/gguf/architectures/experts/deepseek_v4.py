"""DeepSeek-V4: rows that are key and value, mixed streams, experts by token ids in first layers.

    source   conversion/deepseek.py and src/models/deepseek4.cpp of llama.cpp

A file has the published tensors under other names, and its experts in MXFP4, as published.
"""

from __future__ import annotations

from ferryman.gguf.architectures.config_fields import (
    Fields,
    by_layer,
    expert_fields,
    rope_fields,
    trunk_fields,
)
from ferryman.gguf.architectures.experts.latent import indexer_fields
from ferryman.gguf.architectures.experts.sparse_latent import OF_GATES, gate_limit, stream_fields
from ferryman.gguf.architectures.tensor_names import TensorNames
from ferryman.gguf.model_file import GgufFile

_ROOT_OF_SOFTPLUS = 4  # the number of a gating function
_ENDS = {
    "token_embd.weight": "embed.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "head.weight",
    **{f"output_hc_{part}.weight": f"hc_head_{part}" for part in OF_GATES},
}
_ATTENTION = {
    "attn_norm.weight": "attn_norm.weight",
    "attn_sinks.weight": "attn.attn_sink",
    "attn_q_a.weight": "attn.wq_a.weight",
    "attn_q_a_norm.weight": "attn.q_norm.weight",
    "attn_q_b.weight": "attn.wq_b.weight",
    "attn_kv.weight": "attn.wkv.weight",
    "attn_kv_a_norm.weight": "attn.kv_norm.weight",
    "attn_output_a.weight": "attn.wo_a.weight",
    "attn_output_b.weight": "attn.wo_b.weight",
    "indexer.attn_q_b.weight": "attn.indexer.wq_b.weight",
    "indexer.proj.weight": "attn.indexer.weights_proj.weight",
}
_COMPRESSORS = {
    f"{there}_compressor_{part}.weight": f"{here}.compressor.{name}"
    for there, here in {"attn": "attn", "indexer": "attn.indexer"}.items()
    for part, name in {
        "kv": "wkv.weight",
        "gate": "wgate.weight",
        "ape": "ape",
        "norm": "norm.weight",
    }.items()
}
_STREAMS = {
    f"hc_{place}_{part}.weight": f"hc_{place}_{part}"
    for place in ("attn", "ffn")
    for part in OF_GATES
}
_PRODUCTS = {"gate": "w1", "down": "w2", "up": "w3"}
_EXPERTS = {
    "ffn_norm.weight": "ffn_norm.weight",
    "ffn_gate_inp.weight": "ffn.gate.weight",
    "exp_probs_b.bias": "ffn.gate.bias",
    "ffn_gate_tid2eid.weight": "ffn.gate.tid2eid",
    **{f"ffn_{a}_exps.weight": f"ffn.experts.{{}}.{b}.weight" for a, b in _PRODUCTS.items()},
    **{f"ffn_{a}_shexp.weight": f"ffn.shared_experts.{b}.weight" for a, b in _PRODUCTS.items()},
}


def deepseek_v4_names(model: GgufFile) -> TensorNames:
    """The published names."""
    layer = {**_ATTENTION, **_COMPRESSORS, **_STREAMS, **_EXPERTS}
    return TensorNames(_ENDS, layer, layers="layers")


def deepseek_v4_fields(model: GgufFile) -> Fields:
    """A scaling is that of layers with compressed keys alone, as in published configs."""
    metadata, head_dim = model.metadata, model.metadata.whole("{arch}.attention.key_length")
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        **trunk_fields(model),
        "num_attention_heads": metadata.whole("{arch}.attention.head_count"),
        "head_dim": head_dim,
        "q_lora_rank": metadata.whole("{arch}.attention.q_lora_rank"),
        "o_groups": metadata.whole("{arch}.attention.output_group_count"),
        "o_lora_rank": metadata.whole("{arch}.attention.output_lora_rank"),
        "sliding_window": metadata.whole("{arch}.attention.sliding_window"),
        **rope_fields(model, head_dim),
        "compress_rope_theta": metadata.number("{arch}.attention.compress_rope_freq_base"),
        "compress_ratios": by_layer(model, "{arch}.attention.compress_ratios"),
        **indexer_fields(model),
        **_mixture_fields(model),
        **stream_fields(model),
        "hc_sinkhorn_iters": metadata.whole("{arch}.hyper_connection.sinkhorn_iterations"),
    }


def _mixture_fields(model: GgufFile) -> Fields:
    """Routed and shared experts have one limit."""
    metadata, shared = model.metadata, "{arch}.swiglu_clamp_shexp"
    choice, limit = "{arch}.expert_gating_func", gate_limit(model, "{arch}.swiglu_clamp_exp")
    if metadata.has(shared) and gate_limit(model, shared) != limit:
        raise metadata.refusal(shared, f"that of routed experts, {limit:g}")
    if metadata.whole(choice) != _ROOT_OF_SOFTPLUS:
        raise metadata.refusal(choice, f"{_ROOT_OF_SOFTPLUS} (the root of softplus)")
    return {
        **expert_fields(model, count="n_routed_experts"),
        "num_hash_layers": metadata.whole("{arch}.hash_layer_count"),
        "n_shared_experts": metadata.whole("{arch}.expert_shared_count"),
        "moe_intermediate_size": metadata.whole("{arch}.expert_feed_forward_length"),
        "norm_topk_prob": metadata.flag("{arch}.expert_weights_norm"),
        "routed_scaling_factor": metadata.number("{arch}.expert_weights_scale"),
        "swiglu_limit": limit,
    }
