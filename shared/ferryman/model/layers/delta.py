"""The gated delta net (Yang, Kautz & Hatamizadeh 2024) over slot-indexed state: Qwen's and OLMo's.

q k v, z, b, a = u · Win
q, k, v        = silu(conv(q k v));   q, k scaled to length one in each head;   q / √k_dim
β, g           = max_rate·sigmoid(b), -exp(A_log)·softplus(a + dt_bias)
y              = gated delta rule of q, k, v with decay exp(g) and rate β
out            = norm(y) · silu(z) · Wout      a norm for each value head; in Qwen 4 · sigmoid(z)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.model.layers.decoder_layers import LayerPlace
from ferryman.model.layers.gating import NormThenGate, NormThenSigmoid, ScanGate
from ferryman.model.shapes.batch import PrefillBatch, StepBatch
from ferryman.model.shapes.delta_shapes import DeltaGate, DeltaLayout, DeltaShape
from ferryman.model.shapes.ranks import Cuttable, Group, share_of
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear
from ferryman.model.weights.matrix import Matrix, join_linear, split_rows, summed_linear
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.recurrence.causal_conv import causal_conv_prefill
from ferryman_kernels.recurrence.delta_step import DeltaWeights


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The recurrent mixer of layer `layer`. `scan_block` is the block of the scan."""

    layer: int
    shape: DeltaShape
    scan_block: int
    project_in: Linear
    step: DeltaWeights
    gate: ScanGate
    project_out: Linear

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        mixed, z, a, b = self._project(hidden)
        conv, ssm = state.conv[self.layer], state.ssm[self.layer]
        if isinstance(batch, PrefillBatch):
            mixed = causal_conv_prefill(mixed, conv, self.step.conv_weight, None, *batch.scans)
            inputs = self.step.inputs(mixed, a, b, self.shape.v_heads, self.shape.v_dim)
            y = state.kernels.delta_scan(*inputs, ssm, *batch.scans, self.scan_block)
            return self._finish(y, z)

        def advance(mixed: Tensor, a: Tensor, b: Tensor, *slots: Tensor) -> Tensor:
            return state.kernels.delta_step(mixed, a, b, self.step, conv, ssm, *slots)

        return self._finish(batch.wave_by_wave(advance, mixed, a, b), z)

    def _finish(self, y: Tensor, z: Tensor) -> Tensor:
        return self.project_out(self.gate(y.flatten(1), z))

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q k v [tokens, conv_dim], z [tokens, value_dim], a and b [tokens, v_heads]."""
        shape = self.shape
        mixed, z, b, a = self.project_in(hidden).split_with_sizes(
            (shape.conv_dim, shape.value_dim, shape.v_heads, shape.v_heads), dim=1
        )
        return mixed, z, a, b


def load_delta(weights: Weights, shape: DeltaShape, place: LayerPlace) -> DeltaNet:
    """The gated delta net under `weights`: a rank's value heads, and the key heads they read."""
    group = weights.group
    rank_shape = shape.shard(group.num_ranks)
    conv_parts = _conv_parts(weights, shape)
    out = weights.matrix("out_proj.weight", place.hidden_dim, shape.value_dim)
    heads = partial(share_of, heads=shape.v_heads, group=group)
    decay, dt_bias = (
        weights.precise(name, shape.v_heads, part=heads) for name in ("A_log", "dt_bias")
    )
    gate = NormThenSigmoid if shape.gate is DeltaGate.SIGMOID else NormThenGate
    # One weight serves all heads; the kernel reads a row of them.
    norm_weight = weights.precise("norm.weight", shape.v_dim).repeat(rank_shape.v_heads)
    return DeltaNet(
        layer=place.layer,
        shape=rank_shape,
        scan_block=place.scan_block,
        project_in=join_linear(_cut(_in_rows(weights, shape, place.hidden_dim), shape, group)),
        step=DeltaWeights(
            conv_weight=torch.cat(_cut(conv_parts, shape, group)),
            unit=conv_parts[0].new_full((shape.k_dim,), shape.k_dim**-0.5),
            decay=decay.exp(),
            dt_bias=dt_bias,
            max_rate=shape.max_rate,
        ),
        gate=gate(norm_weight, place.norm_eps, rank_shape.v_heads),
        project_out=summed_linear(share_of(out, shape.v_heads, group, axis=1), None, group),
    )


def _conv_parts(weights: Weights, shape: DeltaShape) -> list[Tensor]:
    """The weights [channels, conv_width] of q, k and v."""
    channels, width = shape.conv_dim, shape.conv_width
    if weights.has("q_conv1d.weight"):
        whole = torch.cat([_conv_third(weights, role, width) for role in "qkv"])
    else:
        whole = weights.precise("conv1d.weight", channels, 1, width)
    if len(whole) != channels:
        raise ConfigError(
            f"{weights.prefix}: the convolutions of q, k and v have {len(whole)} channels, "
            f"but config.json implies {channels}"
        )
    return list(whole.squeeze(1).split_with_sizes((shape.key_dim, shape.key_dim, shape.value_dim)))


def _conv_third(weights: Weights, role: str, width: int) -> Tensor:
    """One of the three tensors that OLMo stores. transformers cuts all channels into equal thirds,
    others by q, k and v; joined they are the same."""
    name = f"{role}_conv1d.weight"
    return weights.precise(name, weights.header(name).shape[0], 1, width)


def _cut(parts: Sequence[Cuttable], shape: DeltaShape, group: Group) -> list[Cuttable]:
    """A rank's heads of q, k, v and of further parts with value heads."""
    heads = (shape.k_heads, shape.k_heads, *(shape.v_heads for _ in parts[2:]))
    return [share_of(part, count, group) for part, count in zip(parts, heads, strict=True)]


def _in_rows(weights: Weights, shape: DeltaShape, hidden_dim: int) -> Sequence[Matrix]:
    """The rows of the in-projection for q, k, v, z, b and a, heads in their order."""
    key, value, per_key = shape.key_dim, shape.value_dim, shape.v_heads // shape.k_heads
    if shape.layout is DeltaLayout.SEPARATE:
        sizes = {"q": key, "k": key, "v": value, "g": value, "b": shape.v_heads, "a": shape.v_heads}
        return [
            weights.matrix(f"{role}_proj.weight", size, hidden_dim) for role, size in sizes.items()
        ]
    if shape.layout is DeltaLayout.BY_ROLE:
        sizes = {"qkv": shape.conv_dim, "z": value, "b": shape.v_heads, "a": shape.v_heads}
        qkv, *others = (
            weights.matrix(f"in_proj_{role}.weight", size, hidden_dim)
            for role, size in sizes.items()
        )
        return [*split_rows(qkv, (key, key, value)), *others]
    qkvz = weights.matrix("in_proj_qkvz.weight", 2 * (key + value), hidden_dim)
    ba = weights.matrix("in_proj_ba.weight", 2 * shape.v_heads, hidden_dim)
    values = per_key * shape.v_dim
    return [
        *_by_role(qkvz, shape.k_heads, (shape.k_dim, shape.k_dim, values, values)),
        *_by_role(ba, shape.k_heads, (per_key, per_key)),
    ]


def _by_role(matrix: Matrix, k_heads: int, sizes: tuple[int, ...]) -> list[Matrix]:
    """Parts of `sizes` of each key head, gathered from all key heads."""
    by_head = torch.arange(matrix.shape[0]).view(k_heads, -1)
    return [matrix.with_rows(rows.flatten()) for rows in by_head.split_with_sizes(sizes, dim=1)]
