"""Models with an index as GGUF files, by a second reading of llama.cpp's converter.

    source   conversion/hy_v4.py, dots3.py and deepseek.py of the tree in llama-cpp-python 0.3.36

Nothing is shared with what is tested. That converter itself wrote the same tensors and keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors.torch import load_file
from tests.gguf_models.files import WrittenTensor, floats, write
from tests.gguf_models.qwen4_conversion import hash_keys, qwen4_tensors
from tests.gguf_models.sparse_keys import sparse_keys
from tests.gguf_models.variant_keys import Config
from tests.model.neighbouring_channels import with_neighbours
from tools.bench.gguf.container import Setting

Named = Iterator[tuple[str, np.ndarray]]

_ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "head.weight": "output.weight",
    **{
        f"model.{name}_{part}": f"output_hc_{part}.weight"
        for name in ("hc_pre.hc_head.hc_head", "hc_head.hc")
        for part in ("fn", "base", "scale")
    },
}
_LATENT = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
}
_EXPERTS = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
_PRODUCTS = {"w1": "gate", "w2": "down", "w3": "up"}
_GATES = ("fn", "base", "scale")
_ROWS = {
    "attn_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "attn.attn_sink": "attn_sinks.weight",
    "attn.wq_a": "attn_q_a",
    "attn.q_norm": "attn_q_a_norm",
    "attn.wq_b": "attn_q_b",
    "attn.wkv": "attn_kv",
    # transformers writes `norm` for the published `kv_norm`.
    "attn.norm": "attn_kv_a_norm",
    "attn.wo_a": "attn_output_a",
    "attn.wo_b": "attn_output_b",
    "attn.indexer.wq_b": "indexer.attn_q_b",
    "attn.indexer.weights_proj": "indexer.proj",
    "ffn.gate": "ffn_gate_inp",
    "ffn.gate.bias": "exp_probs_b.bias",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight",
    **{f"ffn.shared_experts.{name}": f"ffn_{part}_shexp" for name, part in _PRODUCTS.items()},
    **{f"hc_{at}_{part}": f"hc_{at}_{part}.weight" for at in ("attn", "ffn") for part in _GATES},
}
_COMPRESSORS = {
    f"{here}.compressor.{name}": f"{there}_compressor_{part}"
    for here, there in {"attn": "attn", "attn.indexer": "indexer"}.items()
    for name, part in {"wkv": "kv", "wgate": "gate", "ape": "ape.weight", "norm": "norm"}.items()
}
_OF_ARCHITECTURE: Mapping[str, Mapping[str, str]] = {
    "hy_v4": {
        **_LATENT,
        **_EXPERTS,
        # transformers writes one name for the gates of attention and of MLPs.
        "mlp.linear_gate": "ffn_gate",
        "mlp.shared_experts.linear_gate": "ffn_gate_shexp",
        "self_attn.linear_gate": "attn_gate",
        "self_attn.learnable_sink_param": "attn_sinks.weight",
        **{
            f"hc_pre.hc_{there}_layer.hc_{part}": f"hc_{here}_{part}.weight"
            for there, here in {"attn": "attn", "mlp": "ffn"}.items()
            for part in ("fn", "base", "scale")
        },
    },
    "dots3note": {
        **_LATENT,
        **_EXPERTS,
        "self_attn.k_rope_only_layernorm": "attn_k_norm",
        "self_attn.g_proj": "attn_gate",
    },
    "deepseek4": {**_ROWS, **_COMPRESSORS},
}
_EXPERT = re.compile(r"(?:mlp|ffn)\.experts\.(\d+)\.(\w+)\.weight")
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.(.*)")
_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"} | _PRODUCTS
_I32 = 26
"""ggml's number of the type."""


def write_sparse(folder: Path, file: Path, architecture: str) -> Path:
    """Writes the model in `folder` to `file`, its tensors in float32."""
    return write(file, *sparse_parts(folder, architecture))


def sparse_parts(
    folder: Path, architecture: str
) -> tuple[dict[str, Setting | bytes], list[WrittenTensor]]:
    """The keys and the tensors of the file."""
    config = json.loads((folder / "config.json").read_text())
    metadata: dict[str, Setting | bytes] = {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in sparse_keys(architecture, config)},
        "tokenizer.ggml.eos_token_id": 2,
    }
    tensors = load_file(folder / "model.safetensors")
    if architecture == "hy_v4":
        # Of published rows llama.cpp turns neighbours, transformers halves.
        tensors = with_neighbours(tensors, config)
    plain = {name: tensor.numpy() for name, tensor in sorted(tensors.items())}
    if architecture == "qwen4exp":
        metadata |= hash_keys(plain)
        written = qwen4_tensors(config, plain)
    else:
        written = dict(_written(architecture, config, plain))
    return metadata, [_tensor(*named) for named in written.items()]


def _tensor(name: str, values: np.ndarray) -> WrittenTensor:
    """A tensor in float32, or one of whole numbers."""
    if values.dtype.kind != "i":
        return floats(name, values)
    return WrittenTensor(name, _I32, values.shape, values.astype("<i4").tobytes())


def _written(architecture: str, config: Config, tensors: Mapping[str, np.ndarray]) -> Named:
    """The tensors of the file by name."""
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        if name in _ENDS:
            yield _ENDS[name], values
            continue
        match = _LAYER.fullmatch(name)
        assert match is not None, name
        under, sizes = f"blk.{match[1]}.", _sizes(config, match[1])
        if expert := _EXPERT.fullmatch(match[2]):
            target = f"{under}ffn_{_PARTS[expert[2]]}_exps.weight"
            stacks.setdefault(target, {})[int(expert[1])] = values
            continue
        for target, changed in _converted(architecture, sizes, match[2], values):
            yield under + target, changed
    for target, stack in stacks.items():
        yield target, np.stack([stack[index] for index in range(len(stack))])


def _sizes(config: Config, layer: str) -> Config:
    """The fields with those of one layer laid over them."""
    return {**config, **(config.get("per_layer_config") or {}).get(layer, {})}


def _converted(architecture: str, config: Config, path: str, values: np.ndarray) -> Named:
    """A tensor of a layer under its names in the file."""
    if path.endswith("kv_b_proj.weight"):
        yield from _halves(config, values)
    elif path == "mlp.experts.gate_up_proj":
        gate, up = np.split(values, 2, axis=1)
        yield "ffn_gate_exps.weight", gate
        yield "ffn_up_exps.weight", up
    elif path == "mlp.experts.down_proj":
        yield "ffn_down_exps.weight", values
    elif architecture == "dots3note" and path.endswith("_a_layernorm.weight"):
        # The factor of normed latents, which are as many as a norm has weights.
        scale = (config["hidden_size"] / len(values)) ** 0.5
        yield _target(_OF_ARCHITECTURE[architecture], path), values * np.float32(scale)
    else:
        yield _target(_OF_ARCHITECTURE[architecture], path), values


def _target(names: Mapping[str, str], path: str) -> str:
    if path in names:
        return names[path]
    module, _, kind = path.rpartition(".")
    return f"{names[module]}.{kind}"


def _halves(config: Config, values: np.ndarray) -> Named:
    """Keys and values of latent attention; a head's keys have columns as rows."""
    keys, rank = config["qk_nope_head_dim"], values.shape[-1]
    by_head = values.reshape(-1, keys + config["v_head_dim"], rank)
    yield "attn_k_b.weight", np.ascontiguousarray(by_head[:, :keys].swapaxes(1, 2))
    yield "attn_v_b.weight", np.ascontiguousarray(by_head[:, keys:])
