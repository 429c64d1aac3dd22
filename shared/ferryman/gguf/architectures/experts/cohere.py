"""Cohere: Command R, Command R7B and North, whose attention and MLP or experts share one norm.

    source   conversion/command_r.py, src/models/command-r.cpp, cohere2.cpp and cohere2moe.cpp of
             llama.cpp

Norms are around the mean. Heads turn by pairs in a folder, too.
"""

from __future__ import annotations

from ferryman.gguf.architectures.centred_norms import centred_fields
from ferryman.gguf.architectures.config_fields import (
    Fields,
    any_has,
    attention_fields,
    expert_fields,
    inner_dim,
    trunk_fields,
    window_flags,
    window_kinds,
)
from ferryman.gguf.architectures.experts.grouped import mlp_kinds, num_dense
from ferryman.gguf.architectures.tensor_names import (
    ATTENTION,
    ENDS,
    TensorNames,
    expert_names,
    mlp_names,
)
from ferryman.gguf.model_file import GgufFile

_PERIOD = 4
"""Every so many layers of Command R7B one has neither a window nor positions."""
_SOFTMAX, _SIGMOID = 1, 2  # numbers of gating functions
_SELECTIONS = {_SOFTMAX: "softmax", _SIGMOID: "sigmoid"}
_NORM = {"attn_norm.weight": "input_layernorm.weight"}


def cohere_names(model: GgufFile) -> TensorNames:
    """The norms of the heads of Command R+ have a row for each head, in file and folder."""
    return TensorNames(ENDS, {**_NORM, **ATTENTION, **mlp_names()})


def command_r_fields(model: GgufFile) -> Fields:
    """Heads have norms if the file has their tensors."""
    return {
        **centred_fields(model, "CohereForCausalLM"),
        "logit_scale": model.metadata.number("{arch}.logit_scale"),
        "use_qk_norm": any_has(model, "attn_q_norm.weight"),
    }


def cohere2_fields(model: GgufFile) -> Fields:
    metadata = model.metadata
    return {
        **centred_fields(model, "Cohere2ForCausalLM"),
        "logit_scale": metadata.number("{arch}.logit_scale"),
        "sliding_window": metadata.whole("{arch}.attention.sliding_window"),
        "sliding_window_pattern": _PERIOD,
    }


def cohere2_moe_names(model: GgufFile) -> TensorNames:
    experts = {**expert_names("shared_experts"), **mlp_names()}
    return TensorNames(ENDS, {**_NORM, **ATTENTION, **experts})


def cohere2_moe_fields(model: GgufFile) -> Fields:
    """Dense layers stand first, and all of them turn. Shared experts count as one in the mean."""
    metadata = model.metadata
    rms_key = "{arch}.attention.layer_norm_rms_epsilon"
    if metadata.has(rms_key):
        raise metadata.refusal(rms_key, "left out: only norms around the mean are read")
    return {
        "architectures": ["Cohere2MoeForCausalLM"],
        **trunk_fields(model, eps="layer_norm_eps"),
        **attention_fields(model),
        **expert_fields(model),
        "intermediate_size": metadata.whole("{arch}.expert_feed_forward_length"),
        "prefix_dense_intermediate_size": inner_dim(model),
        "first_k_dense_replace": num_dense(model),
        "mlp_layer_types": mlp_kinds(model),
        "num_shared_experts": metadata.whole("{arch}.expert_shared_count", 0),
        "shared_expert_combination_strategy": "average",
        "expert_selection_fn": _selection(model),
        "norm_topk_prob": metadata.flag("{arch}.expert_weights_norm", False),
        "logit_scale": metadata.number("{arch}.logit_scale"),
        "sliding_window": metadata.whole("{arch}.attention.sliding_window"),
        "layer_types": window_kinds(window_flags(model)),
    }


def _selection(model: GgufFile) -> str:
    """The function of experts' scores; llama.cpp takes sigmoids where a file says none."""
    key = "{arch}.expert_gating_func"
    number = model.metadata.whole(key, _SIGMOID) or _SIGMOID
    if number not in _SELECTIONS:
        raise model.metadata.refusal(key, "1 (softmax) or 2 (sigmoid)")
    return _SELECTIONS[number]
