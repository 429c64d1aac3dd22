"""Qwen3-Next for llama.cpp: its "qwen3next"."""

from __future__ import annotations

import torch
from tools.bench.gguf.container import GgufModel, GgufTensor, Setting
from tools.bench.gguf.source import (
    TensorSource,
    attention_settings,
    end_tensors,
    trunk_settings,
)

from ferryman.errors import ConfigError
from ferryman.model.families.qwen_hybrid import NORM_ORIGIN, QwenHybridConfig
from ferryman.model.shapes.attention_shapes import AttentionShape
from ferryman.model.shapes.delta_shapes import DeltaLayout, DeltaShape
from ferryman.model.shapes.feed_forward_shapes import MixtureShape

ATTENTION = {
    "q_proj.weight": "attn_q.weight",
    "k_proj.weight": "attn_k.weight",
    "v_proj.weight": "attn_v.weight",
    "o_proj.weight": "attn_output.weight",
    "q_norm.weight": "attn_q_norm.weight",
    "k_norm.weight": "attn_k_norm.weight",
}
NORMS = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
}
DELTA = {
    "in_proj_ba.weight": "ssm_ba.weight",
    "dt_bias": "ssm_dt.bias",
    "out_proj.weight": "ssm_out.weight",
}
MLP = {"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}


def convert_qwen3_next(config: QwenHybridConfig, source: TensorSource) -> GgufModel:
    """Gated delta nets or gated attention, then experts beside a shared one."""
    experts = _experts_of(config)
    tensors = [_from_one(tensor) for tensor in end_tensors(source, "model.norm.weight")]
    for layer, mixer in enumerate(config.mixers):
        here, there = f"model.layers.{layer}.", f"blk.{layer}."
        tensors += map(_from_one, source.take_named(here, there, NORMS))
        if isinstance(mixer, AttentionShape):
            found = source.take_named(f"{here}self_attn.", there, ATTENTION)
            tensors += map(_from_one, found)
        else:
            tensors += _delta(mixer, source, f"{here}linear_attn.", there)
        tensors += _mixture(experts, source, f"{here}mlp.", there)
    return GgufModel("qwen3next", _settings(config, experts), tuple(tensors))


def _experts_of(config: QwenHybridConfig) -> MixtureShape:
    """The experts of every layer. Raises ConfigError if they differ, or a layer has none."""
    first = config.feed_forwards[0]
    if not isinstance(first, MixtureShape) or set(config.feed_forwards) != {first}:
        raise ConfigError("llama.cpp wants the same experts in every layer of Qwen3-Next")
    return first


def _settings(config: QwenHybridConfig, experts: MixtureShape) -> dict[str, Setting]:
    attention = next(one for one in config.mixers if isinstance(one, AttentionShape))
    delta = next(one for one in config.mixers if isinstance(one, DeltaShape))
    if delta.k_dim != delta.v_dim or delta.layout is not DeltaLayout.BY_KEY_HEAD:
        raise ConfigError("llama.cpp wants keys and values of one size in delta nets")
    assert experts.shared is not None, "the family's reader gives one"
    return {
        **trunk_settings(config.trunk),
        **attention_settings(attention),
        "attention.recurrent_layers": [isinstance(one, DeltaShape) for one in config.mixers],
        "ssm.conv_kernel": delta.conv_width,
        "ssm.state_size": delta.k_dim,
        "ssm.group_count": delta.k_heads,
        "ssm.time_step_rank": delta.v_heads,
        "ssm.inner_size": delta.value_dim,
        "feed_forward_length": experts.experts.inner_dim,
        "expert_count": experts.experts.num_experts,
        "expert_used_count": experts.experts.experts_per_token,
        "expert_feed_forward_length": experts.experts.inner_dim,
        "expert_shared_feed_forward_length": experts.shared.inner_dim,
    }


def _from_one(tensor: GgufTensor) -> GgufTensor:
    """A norm that is stored as its distance from one, as it is; other tensors are unchanged."""
    if not tensor.name.endswith("norm.weight"):
        return tensor
    return GgufTensor(tensor.name, tensor.values.to(torch.float32) + NORM_ORIGIN, False)


def _delta(shape: DeltaShape, source: TensorSource, here: str, there: str) -> list[GgufTensor]:
    # On disk each key head has its rows of q, k, v and z together; there each of the four is.
    per_key = shape.v_heads // shape.k_heads * shape.v_dim
    joined = source.take(f"{here}in_proj_qkvz.weight")
    heads = joined.view(shape.k_heads, -1, joined.shape[1])
    sizes = (shape.k_dim, shape.k_dim, per_key, per_key)
    q, k, v, z = (part.flatten(0, 1) for part in heads.split_with_sizes(sizes, dim=1))
    decay = -torch.exp(source.take(f"{here}A_log").to(torch.float32))
    return [
        *source.take_named(here, there, DELTA),
        GgufTensor(f"{there}attn_qkv.weight", torch.cat([q, k, v]), True),
        GgufTensor(f"{there}attn_gate.weight", z, True),
        GgufTensor(f"{there}ssm_conv1d.weight", source.take(f"{here}conv1d.weight")[:, 0], False),
        GgufTensor(f"{there}ssm_a", decay, False),
        GgufTensor(f"{there}ssm_norm.weight", source.take(f"{here}norm.weight"), False),
    ]


def _mixture(shape: MixtureShape, source: TensorSource, here: str, there: str) -> list[GgufTensor]:
    """Experts are stored one by one, and are one tensor there. Routers stay float32."""
    found = [
        GgufTensor(f"{there}ffn_gate_inp.weight", source.take(f"{here}gate.weight"), False),
        GgufTensor(
            f"{there}ffn_gate_inp_shexp.weight",
            source.take(f"{here}shared_expert_gate.weight")[0],
            False,
        ),
    ]
    for old, new in MLP.items():
        each = [
            source.take(f"{here}experts.{index}.{old}_proj.weight")
            for index in range(shape.experts.num_experts)
        ]
        shared = source.take(f"{here}shared_expert.{old}_proj.weight")
        found += [
            GgufTensor(f"{there}{new}_exps.weight", torch.stack(each), True),
            GgufTensor(f"{there}{new}_shexp.weight", shared, True),
        ]
    return found
