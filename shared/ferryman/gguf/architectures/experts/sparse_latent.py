"""Experts behind latent attention at places that an indexer chooses: HY V4.

    source   conversion/hy_v4.py and src/models/ of llama.cpp

The gates of residual streams are in a file as in a folder.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ferryman.gguf.architectures.config_fields import Fields
from ferryman.gguf.architectures.experts.latent import glm_dsa_fields, sparse_deepseek_names
from ferryman.gguf.architectures.tensor_names import TensorNames
from ferryman.gguf.model_file import GgufFile

OF_GATES = ("fn", "base", "scale")


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
    """Channels turn by halves, as in the folder's model in transformers; llama.cpp turns pairs of
    the same rows."""
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
