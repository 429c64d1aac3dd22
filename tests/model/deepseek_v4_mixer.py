"""The attention of one layer of DeepSeek-V4 alone: transformers' module, and our mixer as a model.

A token's hidden state is a row of a random table, and the mixer's output stands for logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tests.choices import Choices
from tests.oracle import Float64Mode, OracleAnswer
from torch import Tensor
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Attention,
    DeepseekV4RotaryEmbedding,
)

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.block_row_attention import load_block_row_attention
from ferryman.model.layers.decoder_layers import LayerPlace, Mixer
from ferryman.model.layers.row_attention import load_row_attention
from ferryman.model.sampling.prompt_logprobs import PrefilledRows
from ferryman.model.shapes.attention_shapes import RotaryPositions
from ferryman.model.shapes.batch import DecodeBatch, PrefillBatch, StepBatch
from ferryman.model.shapes.manifest import state_manifest
from ferryman.model.shapes.model_shapes import StateShape, TrunkShape
from ferryman.model.shapes.row_shapes import BlockRowsShape, RowAttentionShape, RowIndexShape
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.checkpoint import open_checkpoint
from ferryman.model.weights.named_weights import Weights

VOCAB_SIZE, HIDDEN_DIM, EPS = 50, 24, 1e-6


def tiny_config(layer_type: str) -> DeepseekV4Config:
    """A config of one layer, with a window that several pages hold."""
    return DeepseekV4Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_DIM,
        num_hidden_layers=1,
        num_attention_heads=6,
        head_dim=16,
        q_lora_rank=12,
        o_groups=3,
        o_lora_rank=5,
        sliding_window=11,
        layer_types=[layer_type],
        mlp_layer_types=["moe"],
        partial_rotary_factor=0.5,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        index_n_heads=7,
        index_head_dim=10,
        index_topk=5,
        rms_norm_eps=EPS,
        attn_implementation="eager",
    )


@dataclass(frozen=True, slots=True)
class AttentionOracle:
    """transformers' module in float64, on rows of `table` [vocab, hidden_dim]."""

    config: DeepseekV4Config
    module: DeepseekV4Attention
    table: Tensor

    def answer(self, token_ids: Sequence[int]) -> OracleAnswer:
        """The outputs [tokens, hidden_dim] of one call without a cache, in place of logits."""
        positions, window = torch.arange(len(token_ids)), self.config.sliding_window
        ages = positions[:, None] - positions
        with torch.inference_mode(), Float64Mode(), Choices(len(token_ids)) as choices:
            hidden = self.table[list(token_ids)][None]
            rotary = DeepseekV4RotaryEmbedding(self.config)
            turns = {
                name: rotary(hidden, position_ids=positions[None], layer_type=name)
                for name in ("main", "compress")
            }
            mask = torch.zeros(ages.shape).masked_fill((ages < 0) | (ages >= window), -torch.inf)
            output: Tensor = self.module(hidden, turns, positions[None], mask[None, None])[0]
        return OracleAnswer(output[0].clone(), choices.num_clear)


def drawn_oracle(layer_type: str, seed: int) -> AttentionOracle:
    """The module with random weights, all of which matter."""
    draw, config = torch.Generator().manual_seed(seed), tiny_config(layer_type)
    with Float64Mode():
        module = DeepseekV4Attention(config, 0).double().eval()
        table = torch.randn(VOCAB_SIZE, HIDDEN_DIM, generator=draw)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            is_matrix = parameter.ndim == 2 and not name.endswith("position_bias")
            scale = parameter.shape[-1] ** -0.5 if is_matrix else 1.0
            parameter.copy_(1 + 0.3 * noise if name.endswith("norm.weight") else noise * scale)
    return AttentionOracle(config, module, table)


@dataclass(frozen=True, slots=True)
class MixerConfig:
    """A model's config of one layer, for its manifest."""

    trunk: TrunkShape
    states: tuple[tuple[StateShape, ...], ...]


@dataclass(frozen=True, slots=True)
class MixerModel:
    """The mixer as a model of token ids."""

    config: MixerConfig
    manifest: StateManifest
    mixer: Mixer
    table: Tensor
    vocab_size: int = HIDDEN_DIM

    def prefill(self, batch: PrefillBatch, state: ModelState) -> PrefilledRows:
        return PrefilledRows(self._mixed(batch, state), lambda output: output)

    def decode(self, batch: DecodeBatch, state: ModelState) -> Tensor:
        return self._mixed(batch, state)

    def _mixed(self, batch: StepBatch, state: ModelState) -> Tensor:
        return self.mixer.forward(self.table[batch.token_ids], batch, state)


def row_shape(config: DeepseekV4Config, rope: str) -> RowAttentionShape:
    """The shape of the attention of `config`, by the rotation that it calls `rope`."""
    parameters = config.rope_parameters[rope]
    dim = int(config.head_dim * parameters["partial_rotary_factor"])
    return RowAttentionShape(
        q_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        query_rank=config.q_lora_rank,
        window_len=config.sliding_window,
        positions=RotaryPositions(parameters["rope_theta"], dim, is_interleaved=True),
        out_groups=config.o_groups,
        out_rank=config.o_lora_rank,
        norm_eps=config.rms_norm_eps,
    )


def saved_weights(oracle: AttentionOracle, folder: Path, dtype: torch.dtype) -> Weights:
    """The module's weights, through a file in float64, for a mixer in `dtype`."""
    tensors = {name: value.contiguous() for name, value in oracle.module.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    return Weights(open_checkpoint(folder), dtype, torch.device("cpu"))


def block_model(
    oracle: AttentionOracle,
    folder: Path,
    dtype: torch.dtype,
    page_size: int,
    arithmetic: str = "cpu",
) -> MixerModel:
    """The mixer of windows and blocks."""
    config, shape = oracle.config, row_shape(oracle.config, "compress")
    length, index = config.compress_rates[config.layer_types[0]], None
    if config.layer_types[0] == "compressed_sparse_attention":
        index = RowIndexShape(config.index_n_heads, config.index_head_dim, config.index_topk)
    blocks = BlockRowsShape(length, config.head_dim, index is not None, index)
    place = LayerPlace(0, HIDDEN_DIM, EPS, 1)
    weights = saved_weights(oracle, folder, dtype)
    mixer = load_block_row_attention(weights, place, shape, blocks)
    states = (shape, blocks, blocks.means)
    return mixer_model(mixer, states, oracle, dtype, page_size, arithmetic)


def window_model(
    oracle: AttentionOracle, folder: Path, dtype: torch.dtype, page_size: int
) -> MixerModel:
    """The mixer of windows alone."""
    shape = row_shape(oracle.config, "main")
    place = LayerPlace(0, HIDDEN_DIM, EPS, 1)
    mixer = load_row_attention(saved_weights(oracle, folder, dtype), place, shape)
    return mixer_model(mixer, (shape,), oracle, dtype, page_size)


def mixer_model(
    mixer: Mixer,
    states: tuple[StateShape, ...],
    oracle: AttentionOracle,
    dtype: torch.dtype,
    page_size: int,
    arithmetic: str = "cpu",
) -> MixerModel:
    """`mixer`, which keeps `states`, in `dtype`."""
    trunk = TrunkShape(VOCAB_SIZE, HIDDEN_DIM, 1, EPS, False, 4096, ())
    config, name = MixerConfig(trunk, (states,)), str(dtype).removeprefix("torch.")
    manifest = state_manifest(config, name, page_size, "", arithmetic=arithmetic)
    return MixerModel(config, manifest, mixer, oracle.table.to(dtype))
