"""gpt-oss for llama.cpp: its "gpt-oss", with experts in plain dtypes."""

from __future__ import annotations

from tools.bench.gguf.container import GgufModel, GgufTensor, Setting
from tools.bench.gguf.source import TensorSource, end_tensors, trunk_settings

from ferryman.errors import ConfigError
from ferryman.model.families.gpt_oss import GptOssConfig
from ferryman.model.shapes.attention_shapes import AttentionShape, RotaryPositions
from ferryman.model.shapes.rotary import YarnScaling

LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.router.bias": "ffn_gate_inp.bias",
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
}
ATTENTION = {
    f"self_attn.{here}_proj.{part}": f"{there}.{part}"
    for here, there in (("q", "attn_q"), ("k", "attn_k"), ("v", "attn_v"), ("o", "attn_output"))
    for part in ("weight", "bias")
}
# The numbers of the clamped product are constants there.
SWIGLU = (1.702, 7.0)


def convert_gpt_oss(config: GptOssConfig, source: TensorSource) -> GgufModel:
    """Attention with sinks, in windows or full, then experts."""
    if config.is_quantised or (config.swiglu_alpha, config.swiglu_limit) != SWIGLU:
        raise ConfigError(f"only plain experts with alpha and limit {SWIGLU} can be converted")
    tensors = end_tensors(source, "model.norm.weight")
    for layer in range(config.trunk.num_layers):
        here, there = f"model.layers.{layer}.", f"blk.{layer}."
        # Biases of experts have two axes, and are no matrices.
        tensors += [
            GgufTensor(tensor.name, tensor.values, False)
            for tensor in source.take_named(here, there, LAYER)
        ]
        tensors += source.take_named(here, there, ATTENTION)
        tensors += _experts(source, f"{here}mlp.", there)
    return GgufModel("gpt-oss", _settings(config), tuple(tensors))


def _settings(config: GptOssConfig) -> dict[str, Setting]:
    attention, moe = config.attention[0], config.moe
    window = max(shape.window_len for shape in config.attention)
    return {
        **trunk_settings(config.trunk),
        "attention.head_count": attention.q_heads,
        "attention.head_count_kv": attention.kv_heads,
        "attention.key_length": attention.head_dim,
        "attention.value_length": attention.head_dim,
        "attention.sliding_window": window,
        "attention.sliding_window_pattern": [bool(one.window_len) for one in config.attention],
        **_stretched_positions(attention),
        "feed_forward_length": moe.inner_dim,
        "expert_feed_forward_length": moe.inner_dim,
        "expert_count": moe.num_experts,
        "expert_used_count": moe.experts_per_token,
    }


def _stretched_positions(shape: AttentionShape) -> dict[str, Setting]:
    """llama.cpp always rounds the ends of YaRN's ramp; published weights are not rounded."""
    positions = shape.positions
    assert isinstance(positions, RotaryPositions), "the family's reader gives them"
    yarn = positions.scaling
    if not isinstance(yarn, YarnScaling) or positions.rotary_dim != shape.head_dim:
        raise ConfigError("only YaRN over whole heads can be converted")
    return {
        "rope.dimension_count": positions.rotary_dim,
        "rope.freq_base": positions.theta,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": yarn.factor,
        "rope.scaling.original_context_length": yarn.trained_len,
        "rope.scaling.yarn_beta_fast": yarn.beta_fast,
        "rope.scaling.yarn_beta_slow": yarn.beta_slow,
    }


def _experts(source: TensorSource, here: str, there: str) -> list[GgufTensor]:
    """Projections are stored transposed, rows of gate and up alternating."""
    gate_up = source.take(f"{here}experts.gate_up_proj").transpose(1, 2)
    bias = source.take(f"{here}experts.gate_up_proj_bias")
    down = source.take(f"{here}experts.down_proj").transpose(1, 2)
    return [
        GgufTensor(f"{there}ffn_gate_inp.weight", source.take(f"{here}router.weight"), False),
        GgufTensor(f"{there}ffn_gate_exps.weight", gate_up[:, ::2], True),
        GgufTensor(f"{there}ffn_up_exps.weight", gate_up[:, 1::2], True),
        GgufTensor(f"{there}ffn_down_exps.weight", down, True),
        GgufTensor(f"{there}ffn_gate_exps.bias", bias[:, ::2], False),
        GgufTensor(f"{there}ffn_up_exps.bias", bias[:, 1::2], False),
    ]
