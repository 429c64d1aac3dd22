"""Ling 2.5 by the formulas of its published code, token by token: transformers has no such model.

Lightning attention: modeling_bailing_moe_v2_5.py of github.com/inclusionAI/Ring-V2.5 at ae5a5d9,
but for the factor of slopes, which is that of the maker's training and serving code
(docs/decisions/0214). Latent attention and experts are DeepSeek-V3's, by the names of that file.
"""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import torch
from tests.model.families.deepseek import deepseek_fields
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class Ling25Config(PretrainedConfig):  # type: ignore[misc]
    """Any fields. "bailing_hybrid", the published type, is Ling 3's in transformers."""

    model_type = "bailing_moe_v2_5"
    max_position_embeddings: int = 32768
    rope_parameters: Any = None


class Ling25Norm(nn.Module):
    """A norm over each of `groups` equal parts of a row."""

    def __init__(self, dim: int, eps: float, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps, self.groups = eps, groups

    def forward(self, x: Tensor) -> Tensor:
        parts = x.reshape(*x.shape[:-1], self.groups, -1)
        normed = parts / (parts.square().mean(-1, keepdim=True) + self.eps).sqrt()
        weighed: Tensor = normed.flatten(-2) * self.weight
        return weighed


def turned(x: Tensor, pairs: tuple[Tensor, Tensor], waves: Tensor, growth: float) -> Tensor:
    """x [tokens, heads, dim] whose `pairs` of channels turn by position · waves; the rest stays."""
    angles = torch.arange(len(x), dtype=x.dtype)[:, None, None] * waves.to(x.dtype)
    cos, sin = angles.cos() * growth, angles.sin() * growth
    first, second = pairs
    a, b = x[..., first], x[..., second]
    result = x.clone()
    result[..., first], result[..., second] = a * cos - b * sin, b * cos + a * sin
    return result


def waves_of(config: PretrainedConfig, dim: int) -> tuple[Tensor, float]:
    """The angles of a position, and what turned channels are multiplied by."""
    rope = {**config.rope_parameters, "partial_rotary_factor": 1.0}
    if rope["rope_type"] == "default":
        return 1 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim), 1.0
    plain = SimpleNamespace(
        rope_parameters=rope,
        head_dim=dim,
        hidden_size=dim,
        num_attention_heads=1,
        max_position_embeddings=config.max_position_embeddings,
        standardize_rope_params=lambda: None,
    )
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](plain)  # type: ignore[no-any-return]


def alibi_slopes(heads: int) -> list[float]:
    """Press et al. 2022: a power of two has powers of one number; other numbers borrow from it."""
    if math.log2(heads).is_integer():
        first = 2 ** -(2 ** -(math.log2(heads) - 3))
        return [first**number for number in range(1, heads + 1)]
    below = 2 ** math.floor(math.log2(heads))
    return alibi_slopes(below) + alibi_slopes(2 * below)[0::2][: heads - below]


class Ling25Lightning(nn.Module):
    def __init__(self, config: PretrainedConfig, layer: int) -> None:
        super().__init__()
        self.config, heads, head_dim = config, config.num_attention_heads, config.head_dim
        inner, dim, eps = heads * head_dim, config.hidden_size, config.rms_norm_eps
        self.query_key_value = nn.Linear(dim, 3 * inner, bias=False)
        self.query_layernorm = Ling25Norm(head_dim, eps)
        self.key_layernorm = Ling25Norm(head_dim, eps)
        self.g_proj = nn.Linear(dim, inner, bias=False)
        self.g_norm = Ling25Norm(inner, eps, config.group_norm_size)
        self.dense = nn.Linear(inner, dim, bias=False)
        factor = 1 - layer / (config.num_hidden_layers - 1) + 1e-5
        self.decays = [math.exp(-slope * factor) for slope in alibi_slopes(heads)]

    def forward(self, hidden: Tensor) -> Tensor:
        config, heads = self.config, self.config.num_attention_heads
        q, k, v = (
            part.unflatten(-1, (heads, config.head_dim))
            for part in self.query_key_value(hidden).chunk(3, dim=-1)
        )
        turning = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
        channels = torch.arange(turning)
        pairs = channels[: turning // 2], channels[turning // 2 :]
        waves = waves_of(config, turning)
        q = turned(self.query_layernorm(q), pairs, *waves)
        k = turned(self.key_layernorm(k), pairs, *waves)
        decay = torch.tensor(self.decays, dtype=hidden.dtype)[:, None, None]
        state, outputs = hidden.new_zeros(heads, config.head_dim, config.head_dim), []
        for token in range(len(hidden)):
            state = state * decay + k[token, :, :, None] * v[token, :, None, :]
            outputs.append((q[token, :, :, None] * state).sum(1) / math.sqrt(config.head_dim))
        y = self.g_norm(torch.stack(outputs).flatten(1))
        return self.dense(y * torch.sigmoid(self.g_proj(hidden)))  # type: ignore[no-any-return]


class Ling25Latent(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.config, heads, dim = config, config.num_attention_heads, config.hidden_size
        plain, rope, latent = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
        rank, q_dim = config.q_lora_rank, heads * (plain + rope)
        if rank is None:
            self.q_proj = nn.Linear(dim, q_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(dim, rank, bias=False)
            self.q_a_layernorm = Ling25Norm(rank, 1e-6)
            self.q_b_proj = nn.Linear(rank, q_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(dim, latent + rope, bias=False)
        self.kv_a_layernorm = Ling25Norm(latent, 1e-6)
        self.kv_b_proj = nn.Linear(latent, heads * (plain + config.v_head_dim), bias=False)
        self.dense = nn.Linear(heads * config.v_head_dim, dim, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        config, heads = self.config, self.config.num_attention_heads
        plain, rope, latent = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
        has_rank = config.q_lora_rank is not None
        x = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden))) if has_rank else None
        q = (self.q_proj(hidden) if x is None else x).unflatten(-1, (heads, -1))
        latents, k_rope = self.kv_a_proj_with_mqa(hidden).split((latent, rope), dim=-1)
        k_plain, v = (
            self.kv_b_proj(self.kv_a_layernorm(latents))
            .unflatten(-1, (heads, -1))
            .split((plain, config.v_head_dim), dim=-1)
        )
        pairs, waves = (torch.arange(0, rope, 2), torch.arange(1, rope, 2)), waves_of(config, rope)
        q_rope = turned(q[..., plain:], pairs, *waves)
        k_rope = turned(k_rope[:, None], pairs, *waves)[:, 0]
        scores = torch.einsum("thd,shd->hts", q[..., :plain], k_plain)
        scores = (scores + torch.einsum("thd,sd->hts", q_rope, k_rope)) * self._scale()
        ahead = torch.ones(len(hidden), len(hidden), dtype=torch.bool).triu(1)
        shares = scores.masked_fill(ahead, -torch.inf).softmax(-1)
        return self.dense(torch.einsum("hts,shd->thd", shares, v).flatten(1))  # type: ignore[no-any-return]

    def _scale(self) -> float:
        rope, dim = self.config.rope_parameters, self.config.qk_nope_head_dim
        scale = (dim + self.config.qk_rope_head_dim) ** -0.5
        growth = rope.get("mscale_all_dim") or 0.0
        if rope["rope_type"] == "default" or not growth or rope["factor"] <= 1:
            return float(scale)
        return float(scale * (0.1 * growth * math.log(rope["factor"]) + 1) ** 2)


class Ling25Mlp(nn.Module):
    def __init__(self, dim: int, inner_dim: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, inner_dim, bias=False)
        self.up_proj = nn.Linear(dim, inner_dim, bias=False)
        self.down_proj = nn.Linear(inner_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Ling25Gate(nn.Module):
    expert_bias: Tensor

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The shares and the numbers of the experts of each token."""
        config, groups = self.config, self.config.n_group
        scores = torch.sigmoid(x @ self.weight.T)
        ranks = (scores + self.expert_bias).reshape(len(x), groups, -1)
        best = ranks.topk(2, dim=-1).values.sum(-1).topk(config.topk_group, dim=-1).indices
        is_open = torch.zeros(len(x), groups, dtype=torch.bool).scatter(1, best, True)
        ranks = ranks.masked_fill(~is_open[..., None], -torch.inf).flatten(1)
        chosen = ranks.topk(config.num_experts_per_tok, dim=-1).indices
        shares = scores.gather(1, chosen)
        return shares / shares.sum(-1, keepdim=True) * config.routed_scaling_factor, chosen


class Ling25Experts(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        dim, inner_dim = config.hidden_size, config.moe_intermediate_size
        self.gate = Ling25Gate(config)
        self.experts = nn.ModuleList(Ling25Mlp(dim, inner_dim) for _ in range(config.num_experts))
        self.shared_experts = Ling25Mlp(dim, inner_dim * config.num_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.gate(x)
        every = torch.stack([expert(x) for expert in self.experts], dim=1)
        picked = every.gather(1, chosen[..., None].expand(-1, -1, x.shape[1]))
        return (shares[..., None] * picked).sum(1) + self.shared_experts(x)  # type: ignore[no-any-return]


class Ling25Layer(nn.Module):
    """Layer `layer`; those from the model's last on are of multi-token prediction."""

    def __init__(self, config: PretrainedConfig, layer: int) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        is_last = (layer + 1) % config.layer_group_size == 0 or layer >= config.num_hidden_layers
        is_dense = layer < min(config.first_k_dense_replace, config.num_hidden_layers)
        self.attention = Ling25Latent(config) if is_last else Ling25Lightning(config, layer)
        inner_dim = config.intermediate_size
        self.mlp = Ling25Mlp(dim, inner_dim) if is_dense else Ling25Experts(config)
        self.input_layernorm = Ling25Norm(dim, eps)
        self.post_attention_layernorm = Ling25Norm(dim, eps)

    def forward(self, hidden: Tensor, **options: object) -> Tensor:
        """hidden [1, tokens, dim] in and out."""
        row = hidden[0]
        row = row + self.attention(self.input_layernorm(row))
        added: Tensor = row + self.mlp(self.post_attention_layernorm(row))
        return added[None]


class Ling25PreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    config_class = Ling25Config
    base_model_prefix = "model"

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: the tests draw all weights."""


class Ling25Model(Ling25PreTrainedModel):
    def __init__(self, config: Ling25Config) -> None:
        super().__init__(config)
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Ling25Layer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = Ling25Norm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.word_embeddings

    def forward(self, input_ids: Tensor, **options: object) -> BaseModelOutputWithPast:
        hidden = self.word_embeddings(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


class BailingMoeV2_5ForCausalLM(Ling25PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The published name."""

    def __init__(self, config: Ling25Config) -> None:
        super().__init__(config)
        self.model = Ling25Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.word_embeddings

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, **options: object) -> CausalLMOutputWithPast:
        hidden = self.model(input_ids).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden))


AutoConfig.register(Ling25Config.model_type, Ling25Config, exist_ok=True)
AutoModelForCausalLM.register(Ling25Config, BailingMoeV2_5ForCausalLM, exist_ok=True)


def ling_25(rng: random.Random) -> PretrainedConfig:
    """Groups of one to three layers, of which the last is latent; odd numbers of heads."""
    fields, period = deepseek_fields(rng), rng.choice([1, 2, 2, 3])
    num_groups, per_group = rng.choice([1, 2, 3]), rng.choice([2, 3])
    groups_per_token = rng.randint(1, num_groups)
    num_layers, heads = period * rng.choice([1, 2]), rng.choice([1, 3, 4, 6, 8])
    rope = {**fields["rope_parameters"], "partial_rotary_factor": rng.choice([0.5, 1.0])}
    rope = {name: value for name, value in rope.items() if not name.startswith("mscale")}
    others = ("n_routed_experts", "n_shared_experts", "norm_topk_prob", "attention_bias")
    changed = {
        "num_hidden_layers": num_layers,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": rng.choice([4, 8, 12]),
        "q_lora_rank": rng.choice([None, 6, 20]),
        "num_experts": num_groups * per_group,
        "num_shared_experts": rng.choice([1, 2]),
        "n_group": num_groups,
        "topk_group": groups_per_token,
        "num_experts_per_tok": rng.randint(2, groups_per_token * per_group),
        "first_k_dense_replace": rng.randint(0, num_layers),
        "layer_group_size": period,
        "group_norm_size": rng.choice([count for count in (1, 2, 3, 4, 6) if heads % count == 0]),
        "rope_parameters": rope,
    }
    kept = {name: value for name, value in fields.items() if name not in others}
    return Ling25Config(**{**kept, **changed})
