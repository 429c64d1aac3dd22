"""Random tiny model folders of every supported variant, for any test that needs a model.

Every parameter is drawn, none keeps its initial value: an unused norm weight, bias or multiplier
then shows in the logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from ferryman.model.layers.decoder import Model
from ferryman.model.shapes.state import ModelState, state_views

VOCAB_SIZE = 131
MAX_POSITIONS = 1024

_TRUNK: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "mamba_conv_bias": True,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GRANITE: Mapping[str, Any] = {
    **_TRUNK,
    "layer_types": [
        "linear_attention",
        "full_attention",
        "linear_attention",
        "linear_attention",
        "full_attention",
    ],
    "num_local_experts": 0,
    "intermediate_size": 48,
    "shared_intermediate_size": 96,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.7,
}
_BAMBA: Mapping[str, Any] = {
    **_TRUNK,
    "intermediate_size": 96,
    "attn_layer_indices": [1, 4],
}

VARIANTS: Mapping[str, GraniteMoeHybridConfig | BambaConfig] = {
    "granite_nope": GraniteMoeHybridConfig(**{**_GRANITE, "tie_word_embeddings": True}),
    "granite_rope": GraniteMoeHybridConfig(
        **{**_GRANITE, "position_embedding_type": "rope", "mamba_n_groups": 2}
    ),
    "granite_moe": GraniteMoeHybridConfig(
        **{**_GRANITE, "num_local_experts": 6, "num_experts_per_tok": 2, "mamba_proj_bias": True}
    ),
    "granite_moe_rope": GraniteMoeHybridConfig(
        **{
            **_GRANITE,
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "position_embedding_type": "rope",
            "attention_bias": True,
            "time_step_limit": (0.05, 0.4),
        }
    ),
    "bamba": BambaConfig(**_BAMBA),
    "bamba_groups": BambaConfig(
        **{
            **_BAMBA,
            "mamba_n_groups": 4,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        }
    ),
}

_ATTENTION_ALONE = {name: value for name, value in _TRUNK.items() if not name.startswith("mamba")}

WITH_WINDOWS: Mapping[str, PretrainedConfig] = {
    "gpt_oss": GptOssConfig(
        **{
            **_ATTENTION_ALONE,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 32,
        }
    ),
    "gemma3": Gemma3TextConfig(
        **{
            **_ATTENTION_ALONE,
            "num_hidden_layers": 7,
            "head_dim": 16,
            "intermediate_size": 96,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 20.0,
            "sliding_window": 21,
        }
    ),
}
"""Windows that are as long as two pages of 16, and one that is not."""


_DRAWN_BUFFERS = ("e_score_correction_bias", "expert_bias", "balancing_biases", "layer_scalar")


def save_tiny_model(folder: Path, variant: str, *, seed: int = 0) -> Path:
    """Writes the model named `variant` with random weights into `folder`, in float32."""
    return save_random(folder, {**VARIANTS, **WITH_WINDOWS}[variant], seed)


def save_random(folder: Path, config: PretrainedConfig, seed: int) -> Path:
    """Writes a model of `config` with random weights into `folder`, in float32."""
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return save_drawn(folder, model, seed)


def save_drawn(folder: Path, model: PreTrainedModel, seed: int) -> Path:
    """Writes `model` with random weights into `folder`."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            parameter.copy_(drawn(name, parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(_DRAWN_BUFFERS):
                buffer.copy_(drawn(name, buffer))
            if name.endswith("tid2eid"):
                every = torch.rand(len(buffer), model.config.n_routed_experts)
                buffer.copy_(every.argsort(dim=1)[:, : buffer.shape[1]])
    model.save_pretrained(folder)
    return folder


NORMS = (
    *("norm.weight", "norm_1.weight", "norm_2.weight", "norm_mlstm.weight", "norm_ffn.weight"),
    *("ln1.weight", "ln2.weight", "pre_ln.weight", "ln_out.weight", "layer_scalar", ".D"),
)
"""How names of norms and of other factors near one end."""


def drawn(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Values with which every part of a layer matters, and states neither vanish nor explode."""
    noise = torch.randn_like(parameter)
    if name.endswith("A_log"):
        return noise.mul(0.7)
    if name.endswith(("dt_bias", "recurrent_param")):
        return noise.sub(2.0)
    if name.endswith("fgate_preact.bias"):
        return noise.add(3.0)
    if name.endswith("time_decay"):
        return noise.mul(2.0).sub(2.0)
    if ".time_mix_" in name:
        return noise.mul(0.3).add(0.5)
    if name.endswith(NORMS):
        # A weight that starts at zero is stored as its distance from one.
        return noise.mul(0.2).add(1.0 if parameter.any() else 0.0)
    if name.endswith("balancing_biases"):
        # transformers sets the last one to -1 at load (ZAYA); the others lie around it.
        return noise.mul(0.2).sub(1.0).index_fill(0, torch.tensor(len(noise) - 1), -1.0)
    if name.endswith("sinks"):
        return noise.mul(2.0)
    if parameter.ndim == 1:
        return noise.mul(0.2)
    if name.endswith("conv1d.weight"):
        return noise.mul(0.5)
    if name.endswith("embed_tokens.weight"):
        return noise.mul(0.5)
    return noise.mul(1.5 / math.sqrt(parameter.shape[-1]))


def cleared_state(model: Model, device: torch.device) -> ModelState:
    """The state of a model in eight cleared slots of each kind."""
    slabs = {
        layout.kind: torch.zeros(8, layout.slot_bytes, dtype=torch.uint8, device=device)
        for layout in model.manifest.layouts
    }
    return state_views(model.manifest, slabs)
