"""MiniMax-Text-01, and MiniMax M3's text.

    source   conversion/minimax.py, src/models/minimax-01.cpp and minimax-m3.cpp of llama.cpp

A file says neither which layers of Text-01 have lightning attention nor which of M3 have an index:
tensors do. M3's numbers of the activation are in llama.cpp's code, those of published models.
"""

from __future__ import annotations

from ferryman.gguf.architectures.config_fields import (
    Fields,
    attention_fields,
    expert_fields,
    inner_dim,
    trunk_fields,
)
from ferryman.gguf.architectures.experts.grouped import mlp_kinds
from ferryman.gguf.architectures.tensor_names import (
    ATTENTION,
    ENDS,
    LAYER,
    NORMS,
    SHARED,
    TensorNames,
    mlp_names,
)
from ferryman.gguf.architectures.transformer import MIXTRAL_EXPERTS
from ferryman.gguf.model_file import GgufFile

_SIGMOID = 2  # a number of gating functions
_EXPERT_WIDTH = "{arch}.expert_feed_forward_length"
_LIGHTNING = {
    "attn_qkv.weight": "self_attn.qkv_proj.weight",
    "attn_gate.weight": "self_attn.output_gate.weight",
    "attn_norm_2.weight": "self_attn.norm.weight",
    "attn_output.weight": "self_attn.out_proj.weight",
}
_INDEX = {
    f"indexer.{part}.weight": f"self_attn.index_{part}.weight"
    for part in ("q_proj", "k_proj", "q_norm", "k_norm")
}


def minimax_01_names(model: GgufFile) -> TensorNames:
    lightning = _layers_with(model, "attn_gate.weight")
    return TensorNames(
        ENDS,
        {**NORMS, **ATTENTION, **MIXTRAL_EXPERTS},
        of_layers={layer: _LIGHTNING for layer, has in enumerate(lightning) if has},
    )


def minimax_01_fields(model: GgufFile) -> Fields:
    """One factor is that of the residual path in all layers; what is added to it has none."""
    metadata, is_lightning = model.metadata, _layers_with(model, "attn_gate.weight")
    alpha = metadata.number("{arch}.residual_scale")
    return {
        "architectures": ["MiniMaxText01ForCausalLM"],
        **trunk_fields(model),
        **attention_fields(model),
        **expert_fields(model, count="num_local_experts"),
        "intermediate_size": inner_dim(model),
        "layer_types": ["linear_attention" if has else "full_attention" for has in is_lightning],
        **{f"{part}_alpha_factor": alpha for part in ("full_attn", "linear_attn", "mlp")},
    }


def minimax_m3_names(model: GgufFile) -> TensorNames:
    shared = {
        f"{there}.weight": f"block_sparse_moe.shared_experts.{here}_proj.weight"
        for there, here in SHARED.items()
    }
    bias = {"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"}
    layer = {**NORMS, **ATTENTION, **mlp_names(), **MIXTRAL_EXPERTS, **shared, **bias, **_INDEX}
    return TensorNames(ENDS, layer, norms_around_one=True)


def minimax_m3_fields(model: GgufFile) -> Fields:
    """Shares of a token's experts sum to their scale; the shared one is as wide as another."""
    metadata, width = model.metadata, model.metadata.whole(_EXPERT_WIDTH)
    if metadata.whole("{arch}.expert_gating_func") != _SIGMOID:
        raise metadata.refusal("{arch}.expert_gating_func", f"{_SIGMOID} (sigmoid)")
    if not metadata.flag("{arch}.expert_weights_norm", True):
        raise metadata.refusal("{arch}.expert_weights_norm", "true")
    index, has_index = "{arch}.attention.indexer.", _layers_with(model, "indexer.q_proj.weight")
    return {
        "architectures": ["MiniMaxM3ForCausalLM"],
        **trunk_fields(model),
        **attention_fields(model),
        **expert_fields(model, count="num_local_experts"),
        "intermediate_size": width,
        "dense_intermediate_size": inner_dim(model),
        "shared_intermediate_size": width,
        "n_shared_experts": metadata.whole("{arch}.expert_shared_count"),
        "routed_scaling_factor": metadata.number("{arch}.expert_weights_scale", 1.0) or 1.0,
        "mlp_layer_types": mlp_kinds(model),
        "layer_types": ["minimax_m3_sparse" if has else "full_attention" for has in has_index],
        "index_n_heads": metadata.whole(f"{index}head_count"),
        "index_head_dim": metadata.whole(f"{index}key_length"),
        "index_topk_blocks": metadata.whole(f"{index}top_k"),
        "index_block_size": metadata.whole(f"{index}block_size"),
        "index_local_blocks": metadata.whole(f"{index}local_blocks"),
    }


def _layers_with(model: GgufFile, tensor: str) -> list[bool]:
    """Whether each layer has a tensor of this name."""
    layers = range(model.metadata.num_layers)
    return [f"{LAYER}{layer}.{tensor}" in model.tensors for layer in layers]
