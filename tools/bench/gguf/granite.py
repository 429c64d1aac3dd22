"""Granite 3, Granite 4 H and Bamba for llama.cpp: its "granite", "granitemoe", "granitehybrid"."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from tools.bench.gguf.container import GgufModel, GgufTensor, Setting
from tools.bench.gguf.source import (
    TensorSource,
    attention_settings,
    end_tensors,
    in_pairs,
    trunk_settings,
)

from ferryman.errors import ConfigError
from ferryman.model.families.granite import BambaConfig, GraniteHybridConfig
from ferryman.model.layers.mixers import MixerShape
from ferryman.model.layers.transformer import TransformerConfig
from ferryman.model.shapes.attention_shapes import AttentionShape, NoPositions
from ferryman.model.shapes.feed_forward_shapes import MixtureShape, MlpShape, MoeShape
from ferryman.model.shapes.recurrent_shapes import Gating, MambaShape

MLP = {
    f"{here}_proj.{part}": f"{there}.{part}"
    for here, there in (("gate", "ffn_gate"), ("up", "ffn_up"), ("down", "ffn_down"))
    for part in ("weight", "bias")
}


ATTENTION = {
    f"{here}_proj.{part}": f"{there}.{part}"
    for here, there in (("q", "attn_q"), ("k", "attn_k"), ("v", "attn_v"), ("o", "attn_output"))
    for part in ("weight", "bias")
}


def convert_granite(config: TransformerConfig, source: TensorSource) -> GgufModel:
    """Attention and an MLP or experts in every layer."""
    attention, feed_forward = config.attention[0], config.feed_forwards[0]
    if isinstance(feed_forward, MixtureShape):
        architecture, sizes = "granitemoe", _expert_settings(feed_forward.experts)
    else:
        architecture, sizes = "granite", {"feed_forward_length": feed_forward.inner_dim}
    tensors = end_tensors(source, "model.norm.weight")
    for layer in range(config.trunk.num_layers):
        here, there = f"model.layers.{layer}.", f"blk.{layer}."
        tensors += _norms(source, here, there, "post_attention_layernorm")
        tensors += _attention(attention, source, here, there)
        tensors += source.take_named(f"{here}mlp.", there, MLP)
        tensors += _routed(source, f"{here}block_sparse_moe.", there)
    settings = {
        **trunk_settings(config.trunk),
        **attention_settings(attention),
        **_multipliers(config.scales.embedding_multiplier, config.residual_multiplier),
        "attention.scale": attention.scale,
        "logit_scale": config.scales.logits_scaling,
        **sizes,
    }
    return GgufModel(architecture, settings, tuple(tensors))


def convert_granite_hybrid(config: GraniteHybridConfig, source: TensorSource) -> GgufModel:
    """Mamba-2 or attention, then experts beside a shared MLP, or the shared MLP alone."""
    is_dense = config.moe is None
    shared = ("ffn_gate", "ffn_up", "ffn_down") if is_dense else SHARED
    tensors = end_tensors(source, "model.norm.weight")
    for layer, mixer in enumerate(config.mixers):
        here, there = f"model.layers.{layer}.", f"blk.{layer}."
        tensors += _norms(source, here, there, "post_attention_layernorm")
        tensors += _mixer(mixer, source, here, there)
        tensors += _joined_mlp(source, f"{here}shared_mlp.", there, shared)
        tensors += _routed(source, f"{here}block_sparse_moe.", there)
    settings = {
        **trunk_settings(config.trunk),
        **_mixer_settings(config.mixers),
        **_multipliers(config.embedding_multiplier, config.residual_multiplier),
        "logit_scale": config.logits_scaling,
        **_hybrid_sizes(config.shared_mlp, config.moe),
    }
    return GgufModel("granitehybrid", settings, tuple(tensors))


def convert_bamba(config: BambaConfig, source: TensorSource) -> GgufModel:
    """Mamba-2 or attention, then a gated MLP."""
    tensors = end_tensors(source, "model.final_layernorm.weight")
    for layer, mixer in enumerate(config.mixers):
        here, there = f"model.layers.{layer}.", f"blk.{layer}."
        tensors += _norms(source, here, there, "pre_ff_layernorm")
        tensors += _mixer(mixer, source, here, there)
        tensors += source.take_named(f"{here}feed_forward.", there, MLP)
    settings = {
        **trunk_settings(config.trunk),
        **_mixer_settings(config.mixers),
        "feed_forward_length": config.mlp.inner_dim,
    }
    return GgufModel("granitehybrid", settings, tuple(tensors))


SHARED = ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")


def _multipliers(embedding: float, residual: float) -> Mapping[str, Setting]:
    return {"embedding_scale": embedding, "residual_scale": residual}


def _expert_settings(experts: MoeShape) -> dict[str, Setting]:
    return {
        "feed_forward_length": experts.inner_dim,
        "expert_count": experts.num_experts,
        "expert_used_count": experts.experts_per_token,
    }


def _hybrid_sizes(shared: MlpShape, experts: MoeShape | None) -> Mapping[str, Setting]:
    if experts is None:
        return {"feed_forward_length": shared.inner_dim}
    return {**_expert_settings(experts), "expert_shared_feed_forward_length": shared.inner_dim}


def _mixer_settings(mixers: tuple[MixerShape, ...]) -> dict[str, Setting]:
    """The sizes of both kinds of mixer. A layer without key heads is a Mamba layer."""
    attention = next(mixer for mixer in mixers if isinstance(mixer, AttentionShape))
    mamba = next(mixer for mixer in mixers if isinstance(mixer, MambaShape))
    if mamba.ssm_groups > 1:
        raise ConfigError("llama.cpp norms each group alone: only one group can be converted")
    if mamba.gating is not Gating.GATE_THEN_NORM or mamba.dt_limit != (0.0, math.inf):
        raise ConfigError("llama.cpp has neither another order of gate and norm nor time limits")
    heads = [mixer.kv_heads if isinstance(mixer, AttentionShape) else 0 for mixer in mixers]
    return {
        **attention_settings(attention),
        "attention.head_count_kv": heads,
        "attention.scale": attention.scale,
        # llama.cpp reads this as "there are positions".
        "rope.scaling.finetuned": not isinstance(attention.positions, NoPositions),
        "ssm.conv_kernel": mamba.conv_width,
        "ssm.state_size": mamba.ssm_state,
        "ssm.group_count": mamba.ssm_groups,
        "ssm.inner_size": mamba.inner_dim,
        "ssm.time_step_rank": mamba.ssm_heads,
    }


def _norms(source: TensorSource, here: str, there: str, second: str) -> list[GgufTensor]:
    names = {"input_layernorm.weight": "attn_norm.weight", f"{second}.weight": "ffn_norm.weight"}
    return source.take_named(here, there, names)


def _mixer(mixer: MixerShape, source: TensorSource, here: str, there: str) -> list[GgufTensor]:
    if isinstance(mixer, AttentionShape):
        return _attention(mixer, source, here, there)
    return _mamba(source, f"{here}mamba.", there)


def _attention(
    shape: AttentionShape, source: TensorSource, here: str, there: str
) -> list[GgufTensor]:
    found = source.take_named(f"{here}self_attn.", there, ATTENTION)
    heads = {f"{there}attn_q": shape.q_heads, f"{there}attn_k": shape.kv_heads}
    return [
        replace(tensor, values=in_pairs(tensor.values, heads[name], shape.positions))
        if (name := tensor.name.rpartition(".")[0]) in heads
        else tensor
        for tensor in found
    ]


def _mamba(source: TensorSource, here: str, there: str) -> list[GgufTensor]:
    plain = {
        "in_proj.weight": "ssm_in.weight",
        "conv1d.bias": "ssm_conv1d.bias",
        "dt_bias": "ssm_dt.bias",
        "out_proj.weight": "ssm_out.weight",
    }
    decay = -torch.exp(source.take(f"{here}A_log").to(torch.float32))
    return [
        *source.take_named(here, there, plain),
        GgufTensor(f"{there}ssm_conv1d.weight", source.take(f"{here}conv1d.weight")[:, 0], False),
        GgufTensor(f"{there}ssm_a", decay[:, None], False),
        GgufTensor(f"{there}ssm_d", source.take(f"{here}D")[:, None], False),
        GgufTensor(f"{there}ssm_norm.weight", source.take(f"{here}norm.weight")[None], False),
    ]


def _joined_mlp(
    source: TensorSource, here: str, there: str, names: tuple[str, str, str]
) -> list[GgufTensor]:
    """An MLP, or all experts, with gate's rows above those of up in one tensor."""
    gate, up = source.take(f"{here}input_linear.weight").chunk(2, dim=-2)
    matrices = (gate, up, source.take(f"{here}output_linear.weight"))
    return [
        GgufTensor(f"{there}{name}.weight", values, True)
        for name, values in zip(names, matrices, strict=True)
    ]


def _routed(source: TensorSource, here: str, there: str) -> list[GgufTensor]:
    """The experts and their router, if there are any. llama.cpp keeps routers in float32."""
    router = f"{here}router.layer.weight"
    if not source.has(router):
        return []
    scores = GgufTensor(f"{there}ffn_gate_inp.weight", source.take(router), False)
    names = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    return [scores, *_joined_mlp(source, here, there, names)]
