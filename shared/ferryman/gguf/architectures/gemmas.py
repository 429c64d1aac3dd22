"""Gemma 3n and Gemma 4, their text: pages that several layers read, and inputs of each layer.

    source   conversion/gemma.py and src/models/gemma3n.cpp, gemma4.cpp of llama.cpp

Their norms have plain weights in folders, too. A file has Gemma 4's "proportional" positions as
factors of its waves: 1 for those that turn, a huge number for those that stand still.
"""

from __future__ import annotations

from statistics import NormalDist

from ferryman.gguf.architectures.config_fields import (
    Fields,
    by_layer,
    expert_fields,
    trunk_fields,
    window_flags,
    window_kinds,
)
from ferryman.gguf.architectures.tensor_names import (
    ATTENTION,
    ENDS,
    ROPE_FREQS,
    TensorNames,
    mlp_names,
)
from ferryman.gguf.architectures.transformer import GEMMA_NORMS, dense_fields
from ferryman.gguf.model_file import GgufFile

_STANDING = 1e29
"""A factor from this on is of a wave that does not turn; the converter writes 1e30."""
_TABLE = "per_layer_token_embd.weight"
_GELU: Fields = {"hidden_activation": "gelu_pytorch_tanh"}
_ENDS = {
    **ENDS,
    _TABLE: "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_STREAM_ENDS = {
    "altup_proj.weight": "model.altup_projections.{}.weight",
    "altup_unembd_proj.weight": "model.altup_unembed_projections.{}.weight",
}
_LAYER = {
    **GEMMA_NORMS,
    **ATTENTION,
    **mlp_names(),
    "inp_gate.weight": "per_layer_input_gate.weight",
    "proj.weight": "per_layer_projection.weight",
    "post_norm.weight": "post_per_layer_input_norm.weight",
}
_STREAMS = {
    "altup_correct_coef.weight": "altup.correction_coefs.weight",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef.weight": "altup.prediction_coefs.weight",
    "altup_router.weight": "altup.modality_router.weight",
    "altup_router_norm.weight": "altup.router_norm.weight",
    "laurel_l.weight": "laurel.linear_left.weight",
    "laurel_r.weight": "laurel.linear_right.weight",
    "laurel_post_norm.weight": "laurel.post_laurel_norm.weight",
}
_EXPERTS = {
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
}
_JOINED: dict[tuple[str, ...], str] = {
    ("ffn_gate_up_exps.weight",): "experts.gate_up_proj",
    ("ffn_gate_exps.weight", "ffn_up_exps.weight"): "experts.gate_up_proj",
    ("ffn_down_exps.weight",): "experts.down_proj",
}


def gemma3n_names(model: GgufFile) -> TensorNames:
    return TensorNames({**_ENDS, **_STREAM_ENDS}, {**_LAYER, **_STREAMS})


def gemma4_names(model: GgufFile) -> TensorNames:
    return TensorNames(_ENDS, {**_LAYER, **_EXPERTS}, joined=_JOINED)


def gemma3n_fields(model: GgufFile) -> Fields:
    """A file has for each layer by how many deviations a channel must stand out, the folder the
    share of channels that do not."""
    metadata = model.metadata
    rank = model.tensors.get("blk.0.laurel_l.weight")
    if rank is None:
        raise metadata.refusal("{arch}.block_count", "given with a tensor blk.0.laurel_l.weight")
    deviations = metadata.numbers("{arch}.activation_sparsity_scale")
    shares = [float(f"{NormalDist().cdf(value):.6g}") for value in deviations]
    return {
        **dense_fields(model, "Gemma3nForCausalLM"),
        **_common_fields(model),
        "final_logit_softcapping": metadata.number("{arch}.final_logit_softcapping", 30.0),
        "rope_local_base_freq": metadata.number("{arch}.rope.freq_base_swa", 10_000.0),
        "altup_num_inputs": metadata.whole("{arch}.altup.num_inputs"),
        "altup_active_idx": metadata.whole("{arch}.altup.active_idx"),
        "altup_correct_scale": True,
        "laurel_rank": rank.shape[0],
        "activation_sparsity_pattern": shares[: metadata.num_layers],
    }


def gemma4_fields(model: GgufFile) -> Fields:
    metadata = model.metadata
    return {
        "architectures": ["Gemma4ForCausalLM"],
        **trunk_fields(model),
        **_common_fields(model),
        **_heads(model),
        **_widths(model),
        **_experts(model),
        "final_logit_softcapping": metadata.number("{arch}.final_logit_softcapping", 0.0),
        "rope_parameters": _positions(model),
    }


def _common_fields(model: GgufFile) -> Fields:
    """Windows, shared pages and the inputs of layers."""
    metadata, table = model.metadata, model.tensors.get(_TABLE)
    return {
        **_GELU,
        "layer_types": window_kinds(window_flags(model)),
        "sliding_window": metadata.whole("{arch}.attention.sliding_window"),
        "num_kv_shared_layers": metadata.whole("{arch}.attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": metadata.whole("{arch}.embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": 0 if table is None else table.shape[0],
    }


def _heads(model: GgufFile) -> Fields:
    """Heads of full layers have a size and, where their keys are their values, a number of their
    own. Such layers have no tensor of values."""
    metadata, key = model.metadata, "{arch}.attention.head_count_kv"
    near, far = (_of_kind(model, key, is_window=kind) for kind in (True, False))
    are_keys = {
        f"blk.{layer}.attn_v.weight" not in model.tensors
        for layer, is_window in enumerate(window_flags(model)[: _num_own(model)])
        if not is_window
    }
    if len(are_keys) != 1 or (near != far and are_keys == {False}):
        raise metadata.refusal(key, "that of full layers only where none of them has values")
    return {
        "num_attention_heads": _of_kind(model, "{arch}.attention.head_count", is_window=False),
        "num_key_value_heads": near,
        "num_global_key_value_heads": far,
        "head_dim": _head_dim(model, "_swa"),
        "global_head_dim": _head_dim(model, ""),
        "attention_k_eq_v": are_keys == {True},
    }


def _num_own(model: GgufFile) -> int:
    """The number of layers that keep pages of their own; they are the first ones."""
    shared = model.metadata.whole("{arch}.attention.shared_kv_layers", 0)
    return max(model.metadata.num_layers - shared, 0)


def _of_kind(model: GgufFile, key: str, *, is_window: bool) -> int:
    """A number that all layers with windows have, or all without."""
    pairs = zip(by_layer(model, key), window_flags(model), strict=True)
    values = {value for value, flag in pairs if flag is is_window}
    if len(values) != 1:
        raise model.metadata.refusal(key, "alike in layers with windows, and alike in full ones")
    return values.pop()


def _head_dim(model: GgufFile, ending: str) -> int:
    """The size of keys, which is that of values and of what turns."""
    metadata = model.metadata
    size = metadata.whole(f"{{arch}}.attention.key_length{ending}")
    for name in ("attention.value_length", "rope.dimension_count"):
        if metadata.whole(key := f"{{arch}}.{name}{ending}", size) != size:
            raise metadata.refusal(key, f"{size}, as the length of keys")
    return size


def _widths(model: GgufFile) -> Fields:
    """MLPs of layers that read the pages of others may be twice as wide."""
    key, num_own = "{arch}.feed_forward_length", _num_own(model)
    widths = by_layer(model, key)
    is_double = widths[-1] == 2 * widths[0] and num_own < len(widths)
    last = widths[0] * (2 if is_double else 1)
    if widths != [widths[0]] * num_own + [last] * (len(widths) - num_own):
        raise model.metadata.refusal(key, "alike, or double in the layers that share pages")
    return {"intermediate_size": widths[0], "use_double_wide_mlp": is_double}


def _experts(model: GgufFile) -> Fields:
    metadata = model.metadata
    if not metadata.whole("{arch}.expert_count", 0):
        return {"enable_moe_block": False}
    return {
        **expert_fields(model),
        "enable_moe_block": True,
        "moe_intermediate_size": metadata.whole("{arch}.expert_feed_forward_length"),
    }


def _positions(model: GgufFile) -> Fields:
    """Layers with windows turn all waves, full ones the first alone."""
    metadata, kind = model.metadata, "{arch}.rope.scaling.type"
    if metadata.text(kind, "none") != "none":
        raise metadata.refusal(kind, "none")
    factors = model.floats(ROPE_FREQS)
    turning = int((factors == 1.0).sum())
    if not ((factors[:turning] == 1.0).all() and (factors[turning:] >= _STANDING).all()):
        raise metadata.refusal(ROPE_FREQS, "a tensor of ones, then of 1e30")
    # Half a wave more: the family rounds their number down.
    share = min((turning + 0.5) / len(factors), 1.0)
    near = metadata.number("{arch}.rope.freq_base_swa", 10_000.0)
    return {
        "sliding_attention": {"rope_type": "default", "rope_theta": near},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": metadata.number("{arch}.rope.freq_base"),
            "partial_rotary_factor": share,
        },
    }
