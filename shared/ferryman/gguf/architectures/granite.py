"""Granite 3, with and without experts and in windows, and Granite 4: Mamba-2 and attention."""

from __future__ import annotations

from ferryman.gguf.architectures.config_fields import (
    Fields,
    any_has,
    attention_fields,
    by_layer,
    expert_fields,
    inner_dim,
    trunk_fields,
    window_flags,
    window_kinds,
)
from ferryman.gguf.architectures.tensor_names import (
    ATTENTION,
    ENDS,
    NORMS,
    TensorNames,
    mlp_names,
)
from ferryman.gguf.architectures.transformer import dense_fields
from ferryman.gguf.model_file import GgufFile

SHARED_IN, EXPERTS_IN = (
    "shared_mlp.input_linear.weight",
    "block_sparse_moe.input_linear.weight",
)
MAMBA = {
    "ssm_in.weight": "mamba.in_proj.weight",
    "ssm_in.bias": "mamba.in_proj.bias",
    "ssm_conv1d.weight": "mamba.conv1d.weight",
    "ssm_conv1d.bias": "mamba.conv1d.bias",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm.weight": "mamba.norm.weight",
    "ssm_out.weight": "mamba.out_proj.weight",
    "ssm_out.bias": "mamba.out_proj.bias",
}
MAMBA_VECTORS = ("mamba.A_log", "mamba.D", "mamba.norm.weight")
_EXPERTS = {
    "ffn_gate_inp.weight": "block_sparse_moe.router.layer.weight",
    "ffn_down_exps.weight": "block_sparse_moe.output_linear.weight",
    "ffn_down_shexp.weight": "shared_mlp.output_linear.weight",
}
_JOINED: dict[tuple[str, ...], str] = {
    ("ffn_gate_exps.weight", "ffn_up_exps.weight"): EXPERTS_IN,
    ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"): SHARED_IN,
}


def granite_moe_names(model: GgufFile) -> TensorNames:
    layer = {**NORMS, **ATTENTION, **_EXPERTS}
    return TensorNames(ENDS, layer, joined=_JOINED, pairs_rows=True)


def hybrid_names(model: GgufFile) -> TensorNames:
    """A model without experts has its MLP under the plain names."""
    joined = {**_JOINED, ("ffn_gate.weight", "ffn_up.weight"): SHARED_IN}
    dense = {"ffn_down.weight": "shared_mlp.output_linear.weight"}
    return TensorNames(
        ENDS,
        {**NORMS, **ATTENTION, **_EXPERTS, **dense, **MAMBA},
        joined=joined,
        pairs_rows=True,
        vectors=MAMBA_VECTORS,
        convolutions=("mamba.conv1d.weight",),
        logs=("mamba.A_log",),
    )


def granite_swa_names(model: GgufFile) -> TensorNames:
    """A file has gate and up of experts in one tensor, as the folder."""
    experts = {
        "ffn_gate_inp.weight": "block_sparse_moe.router.weight",
        "ffn_gate_up_exps.weight": "block_sparse_moe.experts.gate_up_proj",
        "ffn_down_exps.weight": "block_sparse_moe.experts.down_proj",
        "ffn_down_shexp.weight": "shared_mlp.output_linear.weight",
        "attn_sinks.weight": "self_attn.sinks",
    }
    joined: dict[tuple[str, ...], str] = {
        ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"): SHARED_IN
    }
    layer = {**NORMS, **ATTENTION, **mlp_names(), **experts}
    return TensorNames(ENDS, layer, joined=joined, pairs_rows=True)


def granite_swa_fields(model: GgufFile) -> Fields:
    """Layers without positions are those that a key of flags names; all others have one base."""
    metadata, turning = model.metadata, "{arch}.attention.rope_pattern"
    shared = metadata.whole("{arch}.expert_shared_feed_forward_length", 0)
    has_experts = metadata.whole("{arch}.expert_count", 0) > 0
    fields = {
        **dense_fields(
            model, "GraniteMoeSWAForCausalLM" if has_experts else "GraniteSWAForCausalLM"
        ),
        **_multipliers(model),
        "sliding_window": metadata.whole("{arch}.attention.sliding_window"),
        "layer_types": window_kinds(window_flags(model)),
    }
    if metadata.has(turning):
        base = fields["rope_theta"]
        fields["layer_rope_theta"] = [base if turns else 0 for turns in by_layer(model, turning)]
    if not has_experts:
        return fields
    experts = expert_fields(model, count="num_local_experts")
    return {**fields, **experts, "shared_intermediate_size": shared}


def granite_fields(model: GgufFile) -> Fields:
    return {**dense_fields(model, "GraniteForCausalLM"), **_multipliers(model)}


def granite_moe_fields(model: GgufFile) -> Fields:
    shared = model.metadata.whole("{arch}.expert_shared_feed_forward_length", 0)
    name = "GraniteMoeSharedForCausalLM" if shared else "GraniteMoeForCausalLM"
    return {
        **dense_fields(model, name),
        **_multipliers(model),
        **expert_fields(model, count="num_local_experts"),
        "shared_intermediate_size": shared,
    }


def hybrid_fields(model: GgufFile) -> Fields:
    """A layer without key heads is one of Mamba-2."""
    metadata = model.metadata
    kinds = [
        "attention" if heads else "mamba"
        for heads in by_layer(model, "{arch}.attention.head_count_kv")
    ]
    has_experts = metadata.whole("{arch}.expert_count", 0) > 0
    shared = "{arch}.expert_shared_feed_forward_length"
    # llama.cpp reads this key as "there are positions" in this architecture.
    turns = metadata.flag("{arch}.rope.scaling.finetuned", True)
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        **trunk_fields(model),
        **attention_fields(model),
        **_multipliers(model),
        **mamba_fields(model),
        "layer_types": kinds,
        "position_embedding_type": "rope" if turns else "nope",
        "intermediate_size": inner_dim(model),
        "shared_intermediate_size": metadata.whole(shared, 0) or inner_dim(model),
        **(
            expert_fields(model, count="num_local_experts")
            if has_experts
            else {"num_local_experts": 0}
        ),
    }


def mamba_fields(model: GgufFile, *, expands_hidden: bool = True) -> Fields:
    """A Mamba-2 mixer, by the field names of Granite. Without `expands_hidden` its channels need
    not be a multiple of the hidden size's."""
    metadata = model.metadata
    heads, inner = (
        metadata.whole("{arch}.ssm.time_step_rank"),
        metadata.whole("{arch}.ssm.inner_size"),
    )
    expand, odd = divmod(inner, metadata.whole("{arch}.embedding_length"))
    if (odd and expands_hidden) or not heads or inner % heads:
        raise metadata.refusal("{arch}.ssm.inner_size", "a multiple of hidden size and of heads")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": expand,
        "mamba_d_state": metadata.whole("{arch}.ssm.state_size"),
        "mamba_d_conv": metadata.whole("{arch}.ssm.conv_kernel"),
        "mamba_n_groups": metadata.whole("{arch}.ssm.group_count"),
        "mamba_conv_bias": any_has(model, "ssm_conv1d.bias"),
        "mamba_proj_bias": any_has(model, "ssm_in.bias"),
    }


def _multipliers(model: GgufFile) -> Fields:
    """Without a scale of attention, scores are divided by the root of the head's size."""
    metadata = model.metadata
    head_dim = int(attention_fields(model)["head_dim"])
    return {
        "embedding_multiplier": metadata.number("{arch}.embedding_scale", 1.0),
        "residual_multiplier": metadata.number("{arch}.residual_scale", 1.0),
        "attention_multiplier": metadata.number("{arch}.attention.scale", 0.0) or head_dim**-0.5,
        "logits_scaling": metadata.number("{arch}.logit_scale", 1.0),
    }
