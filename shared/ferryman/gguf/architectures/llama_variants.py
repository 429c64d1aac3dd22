"""Llama with another part: AFM (Arcee), Apertus, Ministral 3, dense GLM-4, MiniCPM 3, the text of
Llama 4, and OLMo 2 and 3 and EXAONE 4, whose norms are behind attention and MLP, with none before
them.

source   conversion/llama.py, mistral3.py, chatglm.py, glm.py, minicpm.py, olmo.py, exaone.py and
         src/models/ of llama.cpp

A file of Llama 4 says neither the length of chunks nor the growth of queries nor which layers have
them: llama.cpp takes the published ones, which the folder's config has by default too. OLMo 3 has
the name of OLMo 2 and windows. Released EXAONE 4 of 64 layers has windows, too.
"""

from __future__ import annotations

from ferryman.gguf.architectures.centred_norms import long_waves, ungated_names
from ferryman.gguf.architectures.config_fields import (
    Fields,
    any_has,
    attention_fields,
    by_layer,
    expert_fields,
    inner_dim,
    rope_fields,
    trunk_fields,
    window_kinds,
)
from ferryman.gguf.architectures.experts.latent import LATENT
from ferryman.gguf.architectures.tensor_names import (
    ATTENTION,
    ENDS,
    NORMS,
    SHARED,
    TensorNames,
    mlp_names,
)
from ferryman.gguf.architectures.transformer import dense_fields
from ferryman.gguf.model_file import GgufFile

_FUSED = {
    "attn_qkv.weight": "self_attn.qkv_proj.weight",
    "attn_qkv.bias": "self_attn.qkv_proj.bias",
    "ffn_up.weight": "mlp.gate_up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_GLM4_NORMS = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_self_attn_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "post_ffw_norm.weight": "post_mlp_layernorm.weight",
}
_LLAMA4_GATE_UP, _LLAMA4_DOWN = (
    f"feed_forward.experts.{name}_proj" for name in ("gate_up", "down")
)
_LLAMA4_SHARED = {
    f"{there}.weight": f"feed_forward.shared_expert.{here}_proj.weight"
    for there, here in SHARED.items()
}
_XIELU = ("alpha_p", "alpha_n")
_NORMS_BEHIND = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_PERIOD = 4
"""Every so many layers one has no window, where a file has no pattern."""
_WINDOW = "{arch}.attention.sliding_window"
_MAVERICK_EXPERTS = 128
"""Llama 4 Maverick does not norm queries and keys, which no key says (src/models/llama4.cpp)."""


def arcee_fields(model: GgufFile) -> Fields:
    """AFM: the MLP has no gate."""
    return {
        **dense_fields(model, "ArceeForCausalLM"),
        "hidden_act": "relu2",
        "mlp_bias": any_has(model, "ffn_up.bias"),
    }


def apertus_names(model: GgufFile) -> TensorNames:
    """The numbers of the activation are keys, an array for all layers; the folder has tensors, two
    of one axis and two of none. Heads turn by halves."""
    layer = {
        "attn_norm.weight": "attention_layernorm.weight",
        "ffn_norm.weight": "feedforward_layernorm.weight",
    }
    return TensorNames(
        ENDS,
        {**layer, **ATTENTION, **ungated_names("up_proj", "down_proj")},
        keys={f"xielu.{name}": f"mlp.act_fn.{name}" for name in (*_XIELU, "beta", "eps")},
        vectors=tuple(f"mlp.act_fn.{name}" for name in _XIELU),
    )


def apertus_fields(model: GgufFile) -> Fields:
    return {**dense_fields(model, "ApertusForCausalLM"), "hidden_act": "xielu"}


def mistral3_fields(model: GgufFile) -> Fields:
    """Mistral Small 3.1 and Ministral 3, in which queries grow with their position.

    YaRN's growth of scores has its key whole, unlike DeepSeek's; `mscale` equals it as published.
    """
    metadata, fields = model.metadata, dense_fields(model, "Ministral3ForCausalLM")
    rope = {"rope_type": "default", **fields.pop("rope_scaling", {})}
    if growth := metadata.number("{arch}.rope.scaling.yarn_log_multiplier", 0.0):
        rope |= {"mscale": growth, "mscale_all_dim": growth}
    if beta := metadata.number("{arch}.attention.temperature_scale", 0.0):
        trained = metadata.whole("{arch}.rope.scaling.original_context_length")
        rope |= {"llama_4_scaling_beta": beta, "original_max_position_embeddings": trained}
    return {**fields, "rope_parameters": {"rope_theta": fields["rope_theta"], **rope}}


def chatglm_names(model: GgufFile) -> TensorNames:
    """A file of the first GLM-4-9B has q, k and v in one tensor, one of its later folder apart."""
    return TensorNames(ENDS, {**NORMS, **ATTENTION, **_FUSED})


def chatglm_fields(model: GgufFile) -> Fields:
    """Neighbouring channels of a part of each head turn together, in the folder too."""
    has_bias = any_has(model, "attn_q.bias") or any_has(model, "attn_qkv.bias")
    return {**dense_fields(model, "GlmForCausalLM"), "attention_bias": has_bias}


def glm4_names(model: GgufFile) -> TensorNames:
    return TensorNames(ENDS, {**_GLM4_NORMS, **ATTENTION, **_FUSED})


def glm4_fields(model: GgufFile) -> Fields:
    return dense_fields(model, "Glm4ForCausalLM")


def minicpm3_names(model: GgufFile) -> TensorNames:
    return TensorNames(ENDS, {**NORMS, **LATENT, **mlp_names()})


def minicpm3_fields(model: GgufFile) -> Fields:
    """Latent attention, whose heads turn by halves. A file has neither the multipliers, of which
    llama.cpp takes those of MiniCPM3-4B, as the folder's config has them by default, nor the size
    of values, which is that of hidden by the heads."""
    metadata, trunk = model.metadata, trunk_fields(model)
    heads = metadata.whole("{arch}.attention.head_count")
    turning, key = metadata.whole("{arch}.rope.dimension_count"), "{arch}.attention.key_length"
    if metadata.whole(key) <= turning:
        raise metadata.refusal(key, f"more than the {turning} channels that turn")
    return {
        "architectures": ["MiniCPM3ForCausalLM"],
        **trunk,
        "num_attention_heads": heads,
        "q_lora_rank": metadata.whole("{arch}.attention.q_lora_rank", 0),
        "kv_lora_rank": metadata.whole("{arch}.attention.kv_lora_rank"),
        "qk_nope_head_dim": metadata.whole(key) - turning,
        "qk_rope_head_dim": turning,
        **rope_fields(model, turning),
        **long_waves(model, "{arch}.context_length"),
        "intermediate_size": inner_dim(model),
    }


def llama4_names(model: GgufFile) -> TensorNames:
    """In a folder experts have rows as columns, and gate and up in one tensor."""
    router = {"ffn_gate_inp.weight": "feed_forward.router.weight"}
    dense = mlp_names("feed_forward.")
    return TensorNames(
        ENDS,
        {**NORMS, **ATTENTION, **dense, **router, **_LLAMA4_SHARED},
        joined={
            ("ffn_gate_exps.weight", "ffn_up_exps.weight"): _LLAMA4_GATE_UP,
            ("ffn_down_exps.weight",): _LLAMA4_DOWN,
        },
        transposed=(_LLAMA4_GATE_UP, _LLAMA4_DOWN),
    )


def llama4_fields(model: GgufFile) -> Fields:
    """Raises ConfigError, by the key, for a model without chunks."""
    metadata, dense = model.metadata, "{arch}.feed_forward_length"
    if metadata.whole("{arch}.attention.sliding_window", 1) == 0:
        raise metadata.refusal("{arch}.attention.sliding_window", "left out: layers have chunks")
    experts = expert_fields(model, count="num_local_experts")
    return {
        "architectures": ["Llama4ForCausalLM"],
        **trunk_fields(model),
        **attention_fields(model),
        **experts,
        "intermediate_size": metadata.whole("{arch}.expert_feed_forward_length"),
        "intermediate_size_mlp": metadata.whole(dense),
        "interleave_moe_layer_step": metadata.whole("{arch}.interleave_moe_layer_step"),
        "no_rope_layer_interval": 4,
        "use_qk_norm": experts["num_local_experts"] != _MAVERICK_EXPERTS,
    }


def norms_behind_names(model: GgufFile) -> TensorNames:
    return TensorNames(ENDS, {**_NORMS_BEHIND, **ATTENTION, **mlp_names()})


def olmo2_fields(model: GgufFile) -> Fields:
    if not model.metadata.whole(_WINDOW, 0):
        return dense_fields(model, "Olmo2ForCausalLM")
    return {**dense_fields(model, "Olmo3ForCausalLM"), **_olmo3_windows(model)}


def exaone4_fields(model: GgufFile) -> Fields:
    fields = dense_fields(model, "Exaone4ForCausalLM")
    return {**fields, **(_olmo3_windows(model) if model.metadata.whole(_WINDOW, 0) else {})}


def _olmo3_windows(model: GgufFile) -> Fields:
    """Layers with and without windows, whose rotations have one base."""
    metadata, near = model.metadata, "{arch}.rope.freq_base_swa"
    base = metadata.number("{arch}.rope.freq_base", 10_000.0)
    if metadata.number(near, base) != base:
        raise metadata.refusal(near, f"{base}, as that of layers without a window")
    return {
        "sliding_window": metadata.whole(_WINDOW),
        "layer_types": window_kinds(_flags(model)),
    }


def _flags(model: GgufFile) -> list[int]:
    metadata, key = model.metadata, f"{_WINDOW}_pattern"
    if not metadata.has(key):
        return [(layer + 1) % _PERIOD for layer in range(metadata.num_layers)]
    flags = by_layer(model, key)
    if set(flags) - {0, 1}:
        raise metadata.refusal(key, "an array of flags")
    return flags
