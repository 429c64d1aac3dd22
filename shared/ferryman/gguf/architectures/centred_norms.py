"""Transformers with norms around the mean: OLMo 1, StableLM, StarCoder 2, GPT-2, GPT-NeoX and Phi
2; and Phi 3 and 4 (mini), whose waves have factors.

    source   conversion/olmo.py, stablelm.py, starcoder.py, phi.py, gpt2.py, gptneox.py and
             src/models/ of llama.cpp

Files of StableLM, Phi 2 and GPT-NeoX say no base of rotations: llama.cpp takes 10,000, as folders
have it. Those of StarCoder 2 say no window; the published one is taken. A file of Phi 3 with a long
context has two tensors of factors, for texts within the first context and beyond it; the growth of
scores is computed from the two lengths, as published.
"""

from __future__ import annotations

from ferryman.gguf.architectures.config_fields import (
    Fields,
    any_has,
    attention_fields,
    inner_dim,
    trunk_fields,
)
from ferryman.gguf.architectures.row_orders import by_key_head
from ferryman.gguf.architectures.tensor_names import (
    ATTENTION,
    ENDS,
    NORMS,
    ROPE_LONG,
    ROPE_SHORT,
    TensorNames,
    mlp_names,
)
from ferryman.gguf.model_file import GgufFile

STARCODER2_WINDOW = 4096
_GPT2_WEIGHTS = {
    "attn_qkv": "attn.c_attn.weight",
    "attn_output": "attn.c_proj.weight",
    "ffn_up": "mlp.c_fc.weight",
    "ffn_down": "mlp.c_proj.weight",
}


def with_biases(names: dict[str, str]) -> dict[str, str]:
    """The names of weights, and those of biases beside them."""
    biases = {
        there.replace(".weight", ".bias"): here.replace(".weight", ".bias")
        for there, here in names.items()
    }
    return {**names, **biases}


CENTRED_ENDS = {**ENDS, **with_biases({"output_norm.weight": "model.norm.weight"})}


def ungated_names(up: str, down: str) -> dict[str, str]:
    """An MLP without a gate."""
    return with_biases(
        {"ffn_up.weight": f"mlp.{up}.weight", "ffn_down.weight": f"mlp.{down}.weight"}
    )


def centred_fields(model: GgufFile, architecture: str, *, eps: str = "layer_norm_eps") -> Fields:
    return {
        "architectures": [architecture],
        **trunk_fields(model, eps=eps),
        **attention_fields(model),
        "intermediate_size": inner_dim(model),
    }


def olmo_names(model: GgufFile) -> TensorNames:
    """Heads turn by pairs, and norms have no weights."""
    return TensorNames(ENDS, {**ATTENTION, **mlp_names()}, pairs_rows=True)


def olmo_fields(model: GgufFile) -> Fields:
    clip = model.metadata.number("{arch}.attention.clamp_kqv", 0.0)
    return {**centred_fields(model, "OlmoForCausalLM"), "clip_qkv": clip or None}


def starcoder2_names(model: GgufFile) -> TensorNames:
    layer = {**with_biases(NORMS), **ATTENTION, **ungated_names("c_fc", "c_proj")}
    return TensorNames(CENTRED_ENDS, layer)


def starcoder2_fields(model: GgufFile) -> Fields:
    return {
        **centred_fields(model, "Starcoder2ForCausalLM", eps="norm_epsilon"),
        "use_bias": any_has(model, "attn_output.bias"),
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": STARCODER2_WINDOW,
    }


def stablelm_names(model: GgufFile) -> TensorNames:
    """A head of StableLM 2 12B has a norm of its own, a row of one tensor in the file."""
    head_norms = {
        f"attn_{head}_norm.weight": f"self_attn.{head}_layernorm.norms.{{}}.weight"
        for head in ("q", "k")
    }
    layer = {**with_biases(NORMS), **ATTENTION, **mlp_names(), **head_norms}
    return TensorNames(CENTRED_ENDS, layer)


def stablelm_fields(model: GgufFile) -> Fields:
    """Attention and MLP share a norm if there is no second one, as llama.cpp tells it."""
    return {
        **centred_fields(model, "StableLmForCausalLM"),
        "use_parallel_residual": not any_has(model, "ffn_norm.weight"),
        "use_qkv_bias": any_has(model, "attn_q.bias"),
        "qk_layernorm": any_has(model, "attn_q_norm.weight"),
    }


def gpt2_names(model: GgufFile) -> TensorNames:
    """The folder has the weights of products transposed."""
    ends = {
        "token_embd.weight": "transformer.wte.weight",
        "position_embd.weight": "transformer.wpe.weight",
        **with_biases({"output_norm.weight": "transformer.ln_f.weight"}),
        "output.weight": "lm_head.weight",
    }
    norms = with_biases({"attn_norm.weight": "ln_1.weight", "ffn_norm.weight": "ln_2.weight"})
    biases = {
        f"{there}.bias": here.replace(".weight", ".bias") for there, here in _GPT2_WEIGHTS.items()
    }
    return TensorNames(
        ends,
        {**norms, **biases},
        layers="transformer.h",
        joined={(f"{there}.weight",): here for there, here in _GPT2_WEIGHTS.items()},
        transposed=tuple(_GPT2_WEIGHTS.values()),
    )


def gpt2_fields(model: GgufFile) -> Fields:
    """A file has no layer's own scale of scores."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        **trunk_fields(model, eps="layer_norm_epsilon"),
        "num_attention_heads": model.metadata.whole("{arch}.attention.head_count"),
        "intermediate_size": inner_dim(model),
        "activation_function": "gelu_new",
    }


def gpt_neox_names(model: GgufFile) -> TensorNames:
    """The folder has q, k and v of each head together, the file all of q first."""
    metadata = model.metadata
    heads = metadata.whole("{arch}.attention.head_count")
    order = by_key_head(heads, *[metadata.whole("{arch}.embedding_length") // heads] * 3)
    joined = with_biases({"attn_qkv.weight": "attention.query_key_value.weight"})
    layer = {
        **with_biases(NORMS),
        **joined,
        **with_biases({"attn_output.weight": "attention.dense.weight"}),
        **ungated_names("dense_h_to_4h", "dense_4h_to_h"),
    }
    ends = {
        "token_embd.weight": "gpt_neox.embed_in.weight",
        **with_biases({"output_norm.weight": "gpt_neox.final_layer_norm.weight"}),
        "output.weight": "embed_out.weight",
    }
    orders = dict.fromkeys(joined.values(), order)
    return TensorNames(ends, layer, layers="gpt_neox.layers", row_orders=orders)


def gpt_neox_fields(model: GgufFile) -> Fields:
    fields = centred_fields(model, "GPTNeoXForCausalLM")
    side_by_side = model.metadata.flag("{arch}.use_parallel_residual", True)
    return {
        **{name: value for name, value in fields.items() if name != "head_dim"},
        "hidden_act": "gelu",
        "attention_bias": any_has(model, "attn_qkv.bias"),
        "partial_rotary_factor": fields.get("partial_rotary_factor", 1.0),
        "use_parallel_residual": side_by_side,
    }


def phi2_names(model: GgufFile) -> TensorNames:
    heads = {there: here.replace("o_proj", "dense") for there, here in ATTENTION.items()}
    final = with_biases({"output_norm.weight": "model.final_layernorm.weight"})
    norm = with_biases({"attn_norm.weight": "input_layernorm.weight"})
    ends = {**ENDS, **final, "output.bias": "lm_head.bias"}
    return TensorNames(ends, {**norm, **heads, **ungated_names("fc1", "fc2")})


def phi2_fields(model: GgufFile) -> Fields:
    return {**centred_fields(model, "PhiForCausalLM"), "hidden_act": "gelu_new"}


def phi3_names(model: GgufFile) -> TensorNames:
    """q, k and v are one tensor in file and folder, gate and up are another."""
    layer = {
        **NORMS,
        "attn_qkv.weight": "self_attn.qkv_proj.weight",
        "attn_output.weight": "self_attn.o_proj.weight",
        "ffn_up.weight": "mlp.gate_up_proj.weight",
        "ffn_down.weight": "mlp.down_proj.weight",
    }
    return TensorNames(ENDS, layer)


def phi3_fields(model: GgufFile) -> Fields:
    """A file without windows says 0."""
    trained = "{arch}.rope.scaling.original_context_length"
    return {
        "architectures": ["Phi3ForCausalLM"],
        **trunk_fields(model),
        **attention_fields(model),
        **long_waves(model, trained),
        "intermediate_size": inner_dim(model),
        "sliding_window": model.metadata.whole("{arch}.attention.sliding_window", 0) or None,
    }


def long_waves(model: GgufFile, key: str) -> Fields:
    """The factors of waves beyond the first context, which `key` has, and within it."""
    if ROPE_LONG not in model.tensors or ROPE_SHORT not in model.tensors:
        return {}
    trained = model.metadata.whole(key)
    return {
        "original_max_position_embeddings": trained,
        "rope_scaling": {
            "rope_type": "longrope",
            "long_factor": [float(factor) for factor in model.floats(ROPE_LONG)],
            "short_factor": [float(factor) for factor in model.floats(ROPE_SHORT)],
            "original_max_position_embeddings": trained,
        },
    }
