"""Experts behind latent attention at places that an indexer chooses: HY V4 and dots3 note.

    source   conversion/hy_v4.py, dots3.py and src/models/ of llama.cpp

The gates of residual streams are in a file as in a folder.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ferryman.gguf.architectures.config_fields import (
    Fields,
    by_layer,
    rope_fields,
    trunk_fields,
    window_flags,
    window_kinds,
)
from ferryman.gguf.architectures.experts.grouped import grouped_fields
from ferryman.gguf.architectures.experts.latent import (
    glm_dsa_fields,
    indexer_fields,
    latent_dims,
    sparse_deepseek_names,
)
from ferryman.gguf.architectures.experts.windowed import alike
from ferryman.gguf.architectures.tensor_names import TensorNames
from ferryman.gguf.model_file import GgufFile

OF_GATES = ("fn", "base", "scale")
_INDEXED = "{arch}.attention.indexer.types"
_CHOICE = "{arch}.expert_gating_func"
_HEADS = "{arch}.attention.head_count"
_SIGMOID = 2  # the number of a gating function


def hy_v4_names(model: GgufFile) -> TensorNames:
    """GLM-5's, with gates and sinks of attention, and the gates of streams by published names."""
    sparse = sparse_deepseek_names(model)
    ends = {f"output_hc_{part}.weight": f"model.hc_head.hc_head_{part}" for part in OF_GATES}
    streams = {
        f"hc_{there}_{part}.weight": f"hc_{here}_layer.hc_pre.hc_{part}"
        for there, here in {"attn": "attn", "ffn": "mlp"}.items()
        for part in OF_GATES
    }
    attention = {
        "attn_gate.weight": "self_attn.linear_gate.weight",
        "attn_sinks.weight": "self_attn.learnable_sink_param",
    }
    return replace(
        sparse, ends={**sparse.ends, **ends}, layer={**sparse.layer, **streams, **attention}
    )


def hy_v4_fields(model: GgufFile) -> Fields:
    """Neighbouring channels turn, as in a published folder."""
    metadata = model.metadata
    return {
        **glm_dsa_fields(model),
        "architectures": ["HYV4ForCausalLM"],
        **stream_fields(model),
        "hc_magnitude": metadata.number("{arch}.hyper_connection.magnitude"),
        "swiglu_limit": gate_limit(model, "{arch}.swiglu_clamp_exp"),
    }


def stream_fields(model: GgufFile) -> Fields:
    """The number of residual streams, and what is added to their gates."""
    return {
        "hc_mult": model.metadata.whole("{arch}.hyper_connection.count"),
        "hc_eps": model.metadata.number("{arch}.hyper_connection.epsilon"),
    }


def gate_limit(model: GgufFile, key: str) -> float:
    """The limit of gate and up of experts, of which a file has one for each layer. Raises
    ConfigError, by the key, for none and for several."""
    limits = set(model.metadata.numbers(key))
    if len(limits) != 1 or min(limits) <= 0:
        raise model.metadata.refusal(key, "a number above 0, alike in all layers")
    # The shortest decimal form of 32 bits is the number that the folder has.
    return float(str(np.float32(limits.pop())))


def dots3_note_names(model: GgufFile) -> TensorNames:
    """DeepSeek-V3.2's, with a norm of the rotating key and gates by head."""
    sparse = sparse_deepseek_names(model)
    attention = {
        "attn_k_norm.weight": "self_attn.k_rope_only_layernorm.weight",
        "attn_gate.weight": "self_attn.g_proj.weight",
    }
    return replace(sparse, layer={**sparse.layer, **attention})


def dots3_note_fields(model: GgufFile) -> Fields:
    """A converter multiplies the norms of latents by what a folder multiplies the latents by."""
    metadata, are_windows = model.metadata, window_flags(model)
    if by_layer(model, _INDEXED) != [not is_window for is_window in are_windows]:
        raise metadata.refusal(_INDEXED, "true for all layers without a window, and no others")
    if metadata.whole(_CHOICE, _SIGMOID) != _SIGMOID:
        raise metadata.refusal(_CHOICE, f"{_SIGMOID} (sigmoid)")
    latent = {
        "num_attention_heads": alike(model, _HEADS, are_windows, is_window=False),
        "q_lora_rank": metadata.whole("{arch}.attention.q_lora_rank"),
        **latent_dims(model),
        **rope_fields(model, metadata.whole("{arch}.rope.dimension_count")),
    }
    return {
        "architectures": ["Dots3NoteForCausalLM"],
        **trunk_fields(model),
        **latent,
        "apply_mla_qkv_lora_rescale": False,
        "layer_types": window_kinds(are_windows),
        "sliding_window": metadata.whole("{arch}.attention.sliding_window"),
        **{f"swa_{name}": value for name, value in _window_fields(model, are_windows).items()},
        **indexer_fields(model),
        **grouped_fields(model),
        "shared_experts_intermediate_size": _shared_width(model),
    }


def _window_fields(model: GgufFile, are_windows: list[bool]) -> Fields:
    """The sizes of layers with a window. The rank of queries is that of all layers."""
    heads, dims = alike(model, _HEADS, are_windows, is_window=True), latent_dims(model, "_swa")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": model.metadata.whole("{arch}.attention.q_lora_rank"),
        **dims,
        "head_dim": dims["qk_nope_head_dim"] + dims["qk_rope_head_dim"],
        "rope_theta": model.metadata.number("{arch}.rope.freq_base_swa"),
    }


def _shared_width(model: GgufFile) -> int:
    """The channels within one shared expert, which no key says."""
    count = model.metadata.whole("{arch}.expert_shared_count")
    wide = [
        header for name, header in model.tensors.items() if name.endswith("ffn_up_shexp.weight")
    ]
    return wide[0].shape[0] // max(count, 1) if wide else 1
