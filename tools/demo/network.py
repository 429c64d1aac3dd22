"""GraniteMoeHybrid (dense, without positions) as a compact module to train on a CPU.

Parameters have the names of the Hugging Face checkpoint, so the trained weights are saved
unchanged. Unlike a general implementation it has rows of equal length, no cache, one group of B and
C, and logits only at requested places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tools.demo.scan import scan
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class DemoShape:
    """Sizes of the demo model."""

    vocab: int
    hidden: int = 128
    layers: tuple[str, ...] = ("mamba", "attention", "mamba", "attention", "mamba")
    mlp: int = 256
    q_heads: int = 4
    kv_heads: int = 2
    ssm_heads: int = 4
    ssm_head_dim: int = 64
    ssm_state: int = 32
    conv_width: int = 4
    embedding_multiplier: float = 4.0
    residual_multiplier: float = 0.5
    attention_multiplier: float = 0.25
    logits_scaling: float = 0.5
    norm_eps: float = 1e-5
    piece: int = 32

    @property
    def ssm_inner(self) -> int:
        return self.ssm_heads * self.ssm_head_dim


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A projection without bias that keeps the scale of its input."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


class Mamba(nn.Module):
    """A Mamba-2 layer."""

    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.shape = shape
        inner, heads = shape.ssm_inner, shape.ssm_heads
        self.conv_dim = inner + 2 * shape.ssm_state
        self.in_proj = linear(shape.hidden, inner + self.conv_dim + heads)
        width = shape.conv_width
        self.conv1d = nn.Conv1d(self.conv_dim, self.conv_dim, width, groups=self.conv_dim)
        step = torch.exp(torch.linspace(-6.9, -2.3, heads))  # 0.001 to 0.1
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.A_log = nn.Parameter(torch.log(torch.linspace(1, 8, heads)))
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = nn.RMSNorm(inner, eps=shape.norm_eps)
        self.out_proj = linear(inner, shape.hidden)

    def forward(self, hidden: Tensor) -> Tensor:  # [rows, tokens, hidden]
        shape, inner = self.shape, self.shape.ssm_inner
        projected: Tensor = self.in_proj(hidden)
        gate, mixed, dt = torch.split(projected, [inner, self.conv_dim, shape.ssm_heads], -1)
        convolved = self.convolved(mixed)
        x, b, c = torch.split(convolved, [inner, shape.ssm_state, shape.ssm_state], -1)
        x = x.reshape(*x.shape[:2], shape.ssm_heads, shape.ssm_head_dim)
        dt = functional.softplus(dt + self.dt_bias)
        y = scan(x, dt, -self.A_log.exp(), b, c, piece=shape.piece) + x * self.D[:, None]
        out: Tensor = self.out_proj(self.norm(y.flatten(2) * functional.silu(gate)))
        return out

    def convolved(self, mixed: Tensor) -> Tensor:
        """The causal convolution as shifted products: faster than grouped conv1d on a CPU."""
        width, tokens = self.shape.conv_width, mixed.shape[1]
        padded = functional.pad(mixed, (0, 0, width - 1, 0))
        weight = self.conv1d.weight[:, 0]
        assert self.conv1d.bias is not None, "made with a bias"
        total: Tensor = self.conv1d.bias
        for tap in range(width):
            total = total + padded[:, tap : tap + tokens] * weight[:, tap]
        return functional.silu(total)


class Attention(nn.Module):
    """Grouped-query attention without positions."""

    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.shape = shape
        self.head_dim = shape.hidden // shape.q_heads
        self.q_proj = linear(shape.hidden, shape.hidden)
        self.k_proj = linear(shape.hidden, shape.kv_heads * self.head_dim)
        self.v_proj = linear(shape.hidden, shape.kv_heads * self.head_dim)
        self.o_proj = linear(shape.hidden, shape.hidden)

    def forward(self, hidden: Tensor) -> Tensor:  # [rows, tokens, hidden]
        shape = self.shape
        query, key, value = (
            project(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        shared = shape.q_heads // shape.kv_heads
        key, value = (t.repeat_interleave(shared, 1) for t in (key, value))
        seen = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=shape.attention_multiplier
        )
        out: Tensor = self.o_proj(seen.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """The gated MLP that every layer has."""

    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.input_linear = linear(shape.hidden, 2 * shape.mlp)
        self.output_linear = linear(shape.mlp, shape.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.input_linear(hidden).chunk(2, -1)
        out: Tensor = self.output_linear(functional.silu(gate) * up)
        return out


class DemoLayer(nn.Module):
    """Mamba or attention, then the MLP, each after a norm and beside a residual."""

    def __init__(self, shape: DemoShape, kind: str) -> None:
        super().__init__()
        self.residual_multiplier = shape.residual_multiplier
        self.mixer = "mamba" if kind == "mamba" else "self_attn"
        self.add_module(self.mixer, Mamba(shape) if kind == "mamba" else Attention(shape))
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.shared_mlp = Mlp(shape)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = self.get_submodule(self.mixer)(self.input_layernorm(hidden))
        hidden = hidden + mixed * self.residual_multiplier
        thought = self.shared_mlp(self.post_attention_layernorm(hidden))
        out: Tensor = hidden + thought * self.residual_multiplier
        return out


class Trunk(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.multiplier = shape.embedding_multiplier
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.05)
        self.layers = nn.ModuleList(DemoLayer(shape, kind) for kind in shape.layers)
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)

    def forward(self, token_ids: Tensor) -> Tensor:  # [rows, tokens]
        hidden = self.embed_tokens(token_ids) * self.multiplier
        for layer in self.layers:
            hidden = layer(hidden)
        out: Tensor = self.norm(hidden)
        return out


class Network(nn.Module):
    """The model; the embedding is also the head."""

    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)

    def forward(self, token_ids: Tensor, wanted: Tensor) -> Tensor:
        """Logits [wanted, vocab] at the places where `wanted` [rows, tokens] is true."""
        hidden = self.model(token_ids)[wanted]
        logits: Tensor = hidden @ self.model.embed_tokens.weight.T / self.shape.logits_scaling
        return logits
