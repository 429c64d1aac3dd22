"""Mamba, Mamba2, FalconMamba, Falcon-H1 and Jamba: state spaces, some beside attention.

Falcon-H1's multipliers are in its weights. A layer of Jamba without key heads is one of Mamba.
"""

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
from ferryman.gguf.architectures.granite import MAMBA, MAMBA_VECTORS, mamba_fields
from ferryman.gguf.architectures.tensor_names import ATTENTION, ENDS, TensorNames, mlp_names
from ferryman.gguf.model_file import GgufFile

_BACKBONE = {
    "token_embd.weight": "backbone.embeddings.weight",
    "output_norm.weight": "backbone.norm_f.weight",
    "output.weight": "lm_head.weight",
}
_FINAL_NORM = {**ENDS, "output_norm.weight": "model.final_layernorm.weight"}
MIXER = {there: here.replace("mamba.", "mixer.") for there, here in MAMBA.items()}
MIXER_VECTORS = tuple(name.replace("mamba.", "mixer.") for name in MAMBA_VECTORS)
_MAMBA1 = {
    "ssm_x.weight": "x_proj.weight",
    "ssm_dt.weight": "dt_proj.weight",
    "ssm_dt.bias": "dt_proj.bias",
}
_JAMBA = {
    **{there: f"mamba.{here}" for there, here in _MAMBA1.items()},
    "ssm_dt_norm.weight": "mamba.dt_layernorm.weight",
    "ssm_b_norm.weight": "mamba.b_layernorm.weight",
    "ssm_c_norm.weight": "mamba.c_layernorm.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "pre_ff_layernorm.weight",
    "ffn_gate_inp.weight": "feed_forward.router.weight",
    **{
        f"ffn_{part}_exps.weight": f"feed_forward.experts.{{}}.{part}_proj.weight"
        for part in ("gate", "up", "down")
    },
}


def mamba_names(model: GgufFile) -> TensorNames:
    layer = {**MIXER, **{there: f"mixer.{here}" for there, here in _MAMBA1.items()}}
    return backbone_names({**layer, "attn_norm.weight": "norm.weight"}, vectors=())


def mamba2_names(model: GgufFile) -> TensorNames:
    return backbone_names({**MIXER, "attn_norm.weight": "norm.weight"}, MIXER_VECTORS)


def backbone_names(layer: dict[str, str], vectors: tuple[str, ...]) -> TensorNames:
    return TensorNames(
        _BACKBONE,
        layer,
        layers="backbone.layers",
        vectors=vectors,
        convolutions=("mixer.conv1d.weight",),
        logs=("mixer.A_log",),
    )


def falcon_h1_names(model: GgufFile) -> TensorNames:
    norms = {
        "attn_norm.weight": "input_layernorm.weight",
        "ffn_norm.weight": "pre_ff_layernorm.weight",
        # llama.cpp's converter leaves the end of this name away.
        "ffn_norm": "pre_ff_layernorm.weight",
    }
    return TensorNames(
        _FINAL_NORM,
        {**norms, **ATTENTION, **MAMBA, **mlp_names("feed_forward.")},
        vectors=MAMBA_VECTORS,
        convolutions=("mamba.conv1d.weight",),
        logs=("mamba.A_log",),
    )


def jamba_names(model: GgufFile) -> TensorNames:
    return TensorNames(
        _FINAL_NORM,
        {**MAMBA, **ATTENTION, **_JAMBA, **mlp_names("feed_forward.")},
        convolutions=("mamba.conv1d.weight",),
        logs=("mamba.A_log",),
    )


def mamba1_model_fields(model: GgufFile) -> Fields:
    """FalconMamba norms dt, B and C."""
    is_normed = model.metadata.flag("{arch}.ssm.dt_b_c_rms", False)
    return {
        "architectures": ["FalconMambaForCausalLM" if is_normed else "MambaForCausalLM"],
        **_mixer_fields(model),
        "intermediate_size": model.metadata.whole("{arch}.ssm.inner_size"),
        "time_step_rank": model.metadata.whole("{arch}.ssm.time_step_rank"),
    }


def mamba2_model_fields(model: GgufFile) -> Fields:
    sizes = mamba_fields(model)
    return {
        "architectures": ["Mamba2ForCausalLM"],
        **_mixer_fields(model),
        "num_heads": sizes["mamba_n_heads"],
        "head_dim": sizes["mamba_d_head"],
        "n_groups": sizes["mamba_n_groups"],
        "expand": sizes["mamba_expand"],
    }


def _mixer_fields(model: GgufFile) -> Fields:
    """A model of mixers alone."""
    metadata = model.metadata
    return {
        **trunk_fields(model, eps="layer_norm_epsilon"),
        "state_size": metadata.whole("{arch}.ssm.state_size"),
        "conv_kernel": metadata.whole("{arch}.ssm.conv_kernel"),
        "use_conv_bias": any_has(model, "ssm_conv1d.bias"),
        "use_bias": any_has(model, "ssm_in.bias"),
    }


def falcon_h1_fields(model: GgufFile) -> Fields:
    """A norm within the mixer comes after its gate."""
    return {
        "architectures": ["FalconH1ForCausalLM"],
        **trunk_fields(model),
        **attention_fields(model),
        **mamba_fields(model, expands_hidden=False),
        "mamba_d_ssm": model.metadata.whole("{arch}.ssm.inner_size"),
        "mamba_rms_norm": any_has(model, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": any_has(model, "ssm_out.bias"),
        "intermediate_size": inner_dim(model),
        "mlp_bias": any_has(model, "ffn_gate.bias"),
    }


def jamba_fields(model: GgufFile) -> Fields:
    metadata = model.metadata
    num_layers = metadata.num_layers
    attends = [bool(heads) for heads in by_layer(model, "{arch}.attention.head_count_kv")]
    has_experts = [f"blk.{n}.ffn_gate_inp.weight" in model.tensors for n in range(num_layers)]
    inner, hidden = (
        metadata.whole("{arch}.ssm.inner_size"),
        metadata.whole("{arch}.embedding_length"),
    )
    if not hidden or inner % hidden:
        raise metadata.refusal("{arch}.ssm.inner_size", "a multiple of hidden size")
    return {
        "architectures": ["JambaForCausalLM"],
        **trunk_fields(model),
        **attention_fields(model),
        **_period(model, "attn_layer", attends),
        **_period(model, "expert_layer", has_experts),
        **expert_fields(model),
        # Jamba's own word for no experts; the file has none or their number all the same.
        **({} if any(has_experts) else {"num_experts": 1}),
        "intermediate_size": inner_dim(model),
        "mamba_expand": inner // hidden,
        "mamba_d_state": metadata.whole("{arch}.ssm.state_size"),
        "mamba_d_conv": metadata.whole("{arch}.ssm.conv_kernel"),
        "mamba_dt_rank": metadata.whole("{arch}.ssm.time_step_rank"),
        "mamba_conv_bias": any_has(model, "ssm_conv1d.bias"),
        "mamba_proj_bias": any_has(model, "ssm_in.bias"),
    }


def _period(model: GgufFile, name: str, flags: list[bool]) -> Fields:
    """The period and offset of the layers with a flag. Raises ConfigError if there is none."""
    places = [layer for layer, flag in enumerate(flags) if flag]
    if not places:
        # No layer has this offset.
        return {f"{name}_period": len(flags) + 1, f"{name}_offset": len(flags)}
    first, *later = places
    period = later[0] - first if later else len(flags)
    if [layer % period == first % period for layer in range(len(flags))] != flags:
        raise model.metadata.refusal("{arch}.attention.head_count_kv", "periodic, as in Jamba")
    return {f"{name}_period": period, f"{name}_offset": first}
