"""Qwen3-Next and Qwen3.5: gated delta nets, and gated attention in some layers."""

from __future__ import annotations

from ferryman.gguf.architectures.config_fields import (
    Fields,
    any_has,
    attention_fields,
    by_layer,
    expert_fields,
    inner_dim,
    trunk_fields,
)
from ferryman.gguf.architectures.row_orders import by_key_head, untiled
from ferryman.gguf.architectures.tensor_names import (
    ATTENTION,
    ENDS,
    TensorNames,
    expert_names,
    mlp_names,
)
from ferryman.gguf.architectures.transformer import SHARED_GATE
from ferryman.gguf.model_file import GgufFile

_NORMS = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
}
_DELTA = {
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
}
_BY_KEY_HEAD = {
    "ssm_in.weight": "linear_attn.in_proj_qkvz.weight",
    "ssm_ba.weight": "linear_attn.in_proj_ba.weight",
}
_BY_ROLE = {
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
}
_EXPERTS = {**expert_names("shared_expert"), "ffn_gate_inp_shexp.weight": SHARED_GATE}
_INTERVAL = 4
"""Every fourth layer has attention, unless a key says otherwise."""


def qwen3_next_names(model: GgufFile) -> TensorNames:
    k_heads, v_heads, k_dim, v_dim = _heads(model)
    of_values = v_heads // k_heads * v_dim
    joined = "linear_attn.in_proj_qkvz.weight"
    return TensorNames(
        ENDS,
        {**_NORMS, **ATTENTION, **_DELTA, **_BY_KEY_HEAD, **_EXPERTS},
        joined={("attn_qkv.weight", "attn_gate.weight"): joined},
        norms_around_one=True,
        plain_norms=("linear_attn.norm.weight",),
        rows=(SHARED_GATE,),
        convolutions=("linear_attn.conv1d.weight",),
        logs=("linear_attn.A_log",),
        joined_orders={joined: by_key_head(k_heads, k_dim, k_dim, of_values, of_values)},
    )


def qwen3_5_names(model: GgufFile) -> TensorNames:
    """A converter lays value heads by their number within a key head, in all tensors of theirs."""
    k_heads, v_heads, k_dim, v_dim = _heads(model)
    by_head, by_channel = untiled(k_heads, v_heads, 1), untiled(k_heads, v_heads, v_dim)
    mixed = untiled(k_heads, v_heads, v_dim, before=2 * k_heads * k_dim)
    orders = {
        "linear_attn.in_proj_qkv.weight": mixed,
        "linear_attn.conv1d.weight": mixed,
        "linear_attn.in_proj_z.weight": by_channel,
        "linear_attn.in_proj_b.weight": by_head,
        "linear_attn.in_proj_a.weight": by_head,
        "linear_attn.dt_bias": by_head,
        "linear_attn.A_log": by_head,
    }
    columns = {"linear_attn.out_proj.weight": by_channel}
    # With one value head to each key head there is nothing to tile.
    is_tiled = k_heads != v_heads
    return TensorNames(
        ENDS,
        {**_NORMS, **ATTENTION, **_DELTA, **_BY_ROLE, **_EXPERTS, **mlp_names()},
        norms_around_one=True,
        plain_norms=("linear_attn.norm.weight",),
        rows=(SHARED_GATE,),
        convolutions=("linear_attn.conv1d.weight",),
        logs=("linear_attn.A_log",),
        row_orders=orders if is_tiled else {},
        column_orders=columns if is_tiled else {},
    )


def qwen3_next_fields(model: GgufFile) -> Fields:
    """The shares of a token's experts sum to 1, as llama.cpp computes them."""
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        **hybrid_fields(model),
        **shared_moe_fields(model),
        "intermediate_size": inner_dim(model),
    }


def qwen3_5_fields(model: GgufFile) -> Fields:
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        **hybrid_fields(model),
        "intermediate_size": inner_dim(model),
    }


def qwen3_5_moe_fields(model: GgufFile) -> Fields:
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        **hybrid_fields(model),
        **shared_moe_fields(model),
    }


def hybrid_fields(model: GgufFile) -> Fields:
    k_heads, v_heads, k_dim, v_dim = _heads(model)
    return {
        **trunk_fields(model),
        **attention_fields(model),
        "attention_bias": any_has(model, "attn_q.bias"),
        "layer_types": [
            "linear_attention" if is_recurrent else "full_attention"
            for is_recurrent in _recurrent_layers(model)
        ],
        "linear_num_key_heads": k_heads,
        "linear_num_value_heads": v_heads,
        "linear_key_head_dim": k_dim,
        "linear_value_head_dim": v_dim,
        "linear_conv_kernel_dim": model.metadata.whole("{arch}.ssm.conv_kernel"),
    }


def _recurrent_layers(model: GgufFile) -> list[bool]:
    metadata, key = model.metadata, "{arch}.attention.recurrent_layers"
    if metadata.has(key):
        return [bool(flag) for flag in by_layer(model, key)]
    interval = metadata.whole("{arch}.full_attention_interval", _INTERVAL) or _INTERVAL
    return [bool((layer + 1) % interval) for layer in range(metadata.num_layers)]


def _heads(model: GgufFile) -> tuple[int, int, int, int]:
    """Key heads, value heads, and the channels of one of each."""
    metadata = model.metadata
    k_heads = metadata.whole("{arch}.ssm.group_count")
    v_heads = metadata.whole("{arch}.ssm.time_step_rank")
    inner = metadata.whole("{arch}.ssm.inner_size")
    if not k_heads or not v_heads or v_heads % k_heads:
        raise metadata.refusal("{arch}.ssm.time_step_rank", f"a multiple of {k_heads} key heads")
    if inner % v_heads:
        raise metadata.refusal("{arch}.ssm.inner_size", f"a multiple of {v_heads} value heads")
    return k_heads, v_heads, metadata.whole("{arch}.ssm.state_size"), inner // v_heads


def shared_moe_fields(model: GgufFile) -> Fields:
    metadata, shared = model.metadata, "{arch}.expert_shared_feed_forward_length"
    return {
        **expert_fields(model),
        "moe_intermediate_size": metadata.whole("{arch}.expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.whole(shared),
        "norm_topk_prob": True,
    }
