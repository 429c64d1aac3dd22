"""Native models with random weights, and their formulas, written out token by token in float64.

Nothing here is shared with what is tested: no page, no slot, no chunk, no kernel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.tiny_models import drawn
from torch import Tensor
from torch.nn import functional as F

Config = Mapping[str, Any]
Tensors = Mapping[str, Tensor]

ALL_KINDS = (
    "full_attention",
    "mamba",
    "sliding_attention",
    "sliding_attention+mamba",
    "full_attention+mamba",
    "linear_attention",
)


def native_config(layer_types: Sequence[str] = ALL_KINDS, **fields: Any) -> Config:
    """A tiny config; `fields` replace or add."""
    return {
        "architectures": ["FerrymanNativeForCausalLM"],
        "model_type": "ferryman_native",
        "vocab_size": 131,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": len(layer_types),
        "layer_types": list(layer_types),
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 21,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position_embeddings": 1024,
        "mamba_n_heads": 6,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 4,
        "eos_token_id": 2,
        **fields,
    }


def save_native(folder: Path, config: Config, seed: int = 0) -> Path:
    """Writes a model of `config` with random weights into `folder`, in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tensors = {name: drawn(name, torch.ones(shape)) for name, shape in _shapes(config).items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def _shapes(config: Config) -> dict[str, tuple[int, ...]]:
    hidden, vocab, inner = (
        config[name] for name in ("hidden_size", "vocab_size", "intermediate_size")
    )
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    sorts = {
        "full_attention": _attention_shapes,
        "sliding_attention": _attention_shapes,
        "mamba": _mamba_shapes,
        "linear_attention": _delta_shapes,
    }
    for index, words in enumerate(config["layer_types"]):
        parts: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        for word in words.split("+"):
            parts |= sorts[word](config)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in parts.items()}
    return shapes


def _attention_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    return {
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
    }


def _mamba_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    heads, inner, groups = _mamba_dims(config)
    conv = inner + 2 * groups
    return {
        "mamba.in_proj.weight": (inner + conv + heads, config["hidden_size"]),
        "mamba.conv1d.weight": (conv, 1, config["mamba_d_conv"]),
        "mamba.conv1d.bias": (conv,),
        "mamba.A_log": (heads,),
        "mamba.D": (heads,),
        "mamba.dt_bias": (heads,),
        "mamba.norm.weight": (inner,),
        "mamba.out_proj.weight": (config["hidden_size"], inner),
    }


def _delta_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    hidden, v_heads, v_dim = (
        config[name] for name in ("hidden_size", "linear_num_value_heads", "linear_value_head_dim")
    )
    keys, values = _delta_dims(config)
    return {
        "linear_attn.in_proj_qkv.weight": (2 * keys + values, hidden),
        "linear_attn.in_proj_z.weight": (values, hidden),
        "linear_attn.in_proj_b.weight": (v_heads, hidden),
        "linear_attn.in_proj_a.weight": (v_heads, hidden),
        "linear_attn.conv1d.weight": (2 * keys + values, 1, config["linear_conv_kernel_dim"]),
        "linear_attn.A_log": (v_heads,),
        "linear_attn.dt_bias": (v_heads,),
        "linear_attn.norm.weight": (v_dim,),
        "linear_attn.out_proj.weight": (hidden, values),
    }


def _delta_dims(config: Config) -> tuple[int, int]:
    """Channels of q (and of k), and of v (and of z)."""
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return keys, config["linear_num_value_heads"] * config["linear_value_head_dim"]


def _mamba_dims(config: Config) -> tuple[int, int, int]:
    """Heads, inner dim, and channels of B (and of C)."""
    heads = config["mamba_n_heads"]
    groups = config["mamba_n_groups"] * config["mamba_d_state"]
    return heads, heads * config["mamba_d_head"], groups


def reference_logits(folder: Path, token_ids: Sequence[int]) -> Tensor:
    """Logits [tokens, vocab] by the formulas alone."""
    config = json.loads((folder / "config.json").read_text())
    weights = {k: v.double() for k, v in load_file(folder / "model.safetensors").items()}
    eps = config["rms_norm_eps"]
    hidden = weights["model.embed_tokens.weight"][torch.tensor(list(token_ids))]
    for index, words in enumerate(config["layer_types"]):
        prefix = f"model.layers.{index}."
        layer = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        normed = _norm(hidden, layer["input_layernorm.weight"], eps)
        for word in words.split("+"):
            hidden = hidden + _mix(word, normed, layer, config)
        hidden = hidden + _mlp(_norm(hidden, layer["post_attention_layernorm.weight"], eps), layer)
    return _norm(hidden, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _mlp(x: Tensor, layer: Tensors) -> Tensor:
    gate, up = x @ layer["mlp.gate_proj.weight"].T, x @ layer["mlp.up_proj.weight"].T
    return (F.silu(gate) * up) @ layer["mlp.down_proj.weight"].T


def _mix(word: str, x: Tensor, layer: Tensors, config: Config) -> Tensor:
    if word == "mamba":
        return _mamba(x, layer, config)
    if word == "linear_attention":
        return _delta(x, layer, config)
    window = config["sliding_window"] if word == "sliding_attention" else len(x)
    return _attention(x, layer, config, window)


def _attention(x: Tensor, layer: Tensors, config: Config, window: int) -> Tensor:
    """Query head h attends with key head h // group to the last `window` positions."""
    dim, tokens = config["head_dim"], len(x)
    q, k, v = ((x @ layer[f"self_attn.{n}_proj.weight"].T).view(tokens, -1, dim) for n in "qkv")
    q, k = _turn(q, config["rope_theta"]), _turn(k, config["rope_theta"])
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    for t in range(tokens):
        first = max(0, t - window + 1)
        for head in range(q.shape[1]):
            keys, values = k[first : t + 1, head // group], v[first : t + 1, head // group]
            out[t, head] = (keys @ q[t, head] * dim**-0.5).softmax(0) @ values
    return out.flatten(1) @ layer["self_attn.o_proj.weight"].T


def _turn(heads: Tensor, theta: float) -> Tensor:
    """Each pair (i, i + dim/2) is a complex number; position t turns it by t · theta^(-2i/dim)."""
    dim = heads.shape[-1]
    angles = torch.arange(len(heads)).double()[:, None] * theta ** (
        -torch.arange(0, dim, 2).double() / dim
    )
    pairs = torch.complex(heads[..., : dim // 2], heads[..., dim // 2 :])
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


def _mamba(x: Tensor, layer: Tensors, config: Config) -> Tensor:
    """The recurrence of Mamba-2, one head and one token after the other."""
    heads, inner, groups = _mamba_dims(config)
    dim, per_group = config["mamba_d_head"], heads // config["mamba_n_groups"]
    projected = x @ layer["mamba.in_proj.weight"].T
    gate, mixed, dt = projected.split_with_sizes((inner, inner + 2 * groups, heads), dim=1)
    mixed = F.silu(_convolve(mixed, layer["mamba.conv1d.weight"], layer["mamba.conv1d.bias"]))
    xs, Bs, Cs = mixed.split_with_sizes((inner, groups, groups), dim=1)
    dt = F.softplus(dt + layer["mamba.dt_bias"])
    decay = (-dt * layer["mamba.A_log"].exp()).exp()
    y = torch.zeros(len(x), heads, dim, dtype=torch.float64)
    for head in range(heads):
        state = torch.zeros(dim, config["mamba_d_state"], dtype=torch.float64)
        of_group = slice(
            head // per_group * config["mamba_d_state"],
            (head // per_group + 1) * config["mamba_d_state"],
        )
        for t in range(len(x)):
            value = xs[t, head * dim : (head + 1) * dim]
            state = decay[t, head] * state + dt[t, head] * torch.outer(value, Bs[t, of_group])
            y[t, head] = state @ Cs[t, of_group] + layer["mamba.D"][head] * value
    grouped = (y.flatten(1) * F.silu(gate)).view(len(x), config["mamba_n_groups"], -1)
    eps = config["rms_norm_eps"]
    normed = (grouped / (grouped.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(1)
    out: Tensor = (normed * layer["mamba.norm.weight"]) @ layer["mamba.out_proj.weight"].T
    return out


def _delta(x: Tensor, layer: Tensors, config: Config) -> Tensor:
    """The gated delta rule, one value head and one token after the other."""
    keys, values = _delta_dims(config)
    k_heads, v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    mixed, z, b, a = (
        x @ layer[f"linear_attn.in_proj_{n}.weight"].T for n in ("qkv", "z", "b", "a")
    )
    conv = layer["linear_attn.conv1d.weight"]
    mixed = F.silu(_convolve(mixed, conv, conv.new_zeros(len(conv))))
    q, k, v = mixed.split_with_sizes((keys, keys, values), dim=1)
    q, k = (rows.view(len(x), k_heads, -1) for rows in (q, k))
    q, k = (rows / (rows.square().sum(-1, keepdim=True) + 1e-6).sqrt() for rows in (q, k))
    v, rate = v.view(len(x), v_heads, -1), b.sigmoid()
    steps = F.softplus(a + layer["linear_attn.dt_bias"])
    decay = (-steps * layer["linear_attn.A_log"].exp()).exp()
    y = torch.zeros_like(v)
    for head in range(v_heads):
        of_key = head // (v_heads // k_heads)
        state = torch.zeros(k.shape[2], v.shape[2], dtype=torch.float64)
        for t in range(len(x)):
            state = decay[t, head] * state
            missing = v[t, head] - k[t, of_key] @ state
            state = state + rate[t, head] * torch.outer(k[t, of_key], missing)
            y[t, head] = q[t, of_key] @ state * k.shape[2] ** -0.5
    normed = _norm(y, layer["linear_attn.norm.weight"], config["rms_norm_eps"]).flatten(1)
    out: Tensor = (normed * F.silu(z)) @ layer["linear_attn.out_proj.weight"].T
    return out


def _convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Each channel sees its own last `width` values, zeros before the first."""
    width = weight.shape[-1]
    padded = torch.cat((x.new_zeros(width - 1, x.shape[1]), x))
    taps = [padded[tap : tap + len(x)] * weight[:, 0, tap] for tap in range(width)]
    return torch.stack(taps).sum(0) + bias
