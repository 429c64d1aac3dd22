"""Nemotron-H: layers of one part each, which a file says by its tensors alone."""

from __future__ import annotations

from dataclasses import replace

from ferryman.gguf.architectures.config_fields import (
    Fields,
    any_has,
    attention_fields,
    expert_fields,
    inner_dim,
    trunk_fields,
)
from ferryman.gguf.architectures.granite import mamba_fields
from ferryman.gguf.architectures.state_spaces import MIXER, MIXER_VECTORS, backbone_names
from ferryman.gguf.architectures.tensor_names import ATTENTION, TensorNames
from ferryman.gguf.model_file import GgufFile

_NEMOTRON = {
    "attn_norm.weight": "norm.weight",
    **{there: here.replace("self_attn.", "mixer.") for there, here in ATTENTION.items()},
    "ffn_up.weight": "mixer.up_proj.weight",
    "ffn_up.bias": "mixer.up_proj.bias",
    "ffn_down.weight": "mixer.down_proj.weight",
    "ffn_down.bias": "mixer.down_proj.bias",
    "ffn_gate_inp.weight": "mixer.gate.weight",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps.weight": "mixer.experts.{}.up_proj.weight",
    "ffn_down_exps.weight": "mixer.experts.{}.down_proj.weight",
    "ffn_up_shexp.weight": "mixer.shared_experts.up_proj.weight",
    "ffn_down_shexp.weight": "mixer.shared_experts.down_proj.weight",
    "ffn_latent_down.weight": "mixer.fc1_latent_proj.weight",
    "ffn_latent_up.weight": "mixer.fc2_latent_proj.weight",
}
_PARTS = {"ssm_in": "mamba", "attn_q": "attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
"""The part of a layer by the first of these tensors that it has."""


def nemotron_h_names(model: GgufFile) -> TensorNames:
    """Heads are paired as if they turned, which they do not."""
    return replace(backbone_names({**MIXER, **_NEMOTRON}, MIXER_VECTORS), pairs_rows=True)


def nemotron_h_fields(model: GgufFile) -> Fields:
    sizes, words = mamba_fields(model, expands_hidden=False), _words(model)
    fields = {
        "architectures": ["NemotronHForCausalLM"],
        **trunk_fields(model, eps="layer_norm_epsilon"),
        **attention_fields(model),
        "layers_block_type": words,
        "mamba_num_heads": sizes["mamba_n_heads"],
        "mamba_head_dim": sizes["mamba_d_head"],
        "n_groups": sizes["mamba_n_groups"],
        "ssm_state_size": sizes["mamba_d_state"],
        "conv_kernel": sizes["mamba_d_conv"],
        "use_conv_bias": sizes["mamba_conv_bias"],
        "use_bias": sizes["mamba_proj_bias"],
        "mlp_bias": any_has(model, "ffn_up.bias"),
    }
    if "mlp" in words:
        fields["intermediate_size"] = inner_dim(model)
    return {**fields, **(_nemotron_experts(model) if "moe" in words else {})}


def _words(model: GgufFile) -> list[str]:
    """The word for the part of each layer."""
    return [_word(model, layer) for layer in range(model.metadata.num_layers)]


def _word(model: GgufFile, layer: int) -> str:
    for part, word in _PARTS.items():
        if f"blk.{layer}.{part}.weight" in model.tensors:
            return word
    # The loader then asks for a tensor of an MLP, and names it.
    return "mlp"


def _nemotron_experts(model: GgufFile) -> Fields:
    metadata = model.metadata
    return {
        **expert_fields(model, count="n_routed_experts"),
        "moe_intermediate_size": metadata.whole("{arch}.expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": metadata.whole(
            "{arch}.expert_shared_feed_forward_length"
        ),
        "moe_latent_size": metadata.whole("{arch}.moe_latent_size", 0),
        "n_group": metadata.whole("{arch}.expert_group_count", 1) or 1,
        "topk_group": metadata.whole("{arch}.expert_group_used_count", 1) or 1,
        "norm_topk_prob": metadata.flag("{arch}.expert_weights_norm", False),
        "routed_scaling_factor": metadata.number("{arch}.expert_weights_scale", 1.0) or 1.0,
    }
