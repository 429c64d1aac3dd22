"""The matrix LSTM of xLSTM (Beck et al. 2024), as xLSTM-7b has it: no convolution before it.

q, k, v, gate = u · W                                                     by head
i, f          = u · Wgates + bgates                                    two numbers of each head
y             = the cell of `ferryman_kernels.recurrence.cells.mlstm`
out           = (sigmoid(gate) · norm(y)) · Wout                       a centred norm of each head
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ferryman.model.layers.centred_norm import CentredHeads
from ferryman.model.layers.decoder_layers import LayerPlace
from ferryman.model.shapes.batch import PrefillBatch, StepBatch
from ferryman.model.shapes.cell_shapes import MlstmShape
from ferryman.model.shapes.ranks import share_of
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear
from ferryman.model.weights.matrix import join_linear, summed_linear
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.elementwise.activations import sigmoid
from ferryman_kernels.recurrence.cells.mlstm import CellStates, mlstm_decode, mlstm_scan
from ferryman_kernels.recurrence.cells.mlstm_rows import CellGates, CellRows


@dataclass(frozen=True, slots=True)
class MlstmMixer:
    """The matrix LSTM of layer `layer`. `shape` is a rank's share of the heads."""

    layer: int
    shape: MlstmShape
    project_in: Linear
    project_gates: Linear
    norm: CentredHeads
    project_out: Linear

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        *rows, gate = self._project(hidden)
        enter, forget = self.project_gates(hidden).chunk(2, dim=1)
        states = CellStates(state.ssm[self.layer], state.norm[self.layer])
        if isinstance(batch, PrefillBatch):
            gates = self._gates(enter, forget)
            return self._finish(mlstm_scan(CellRows(*rows), gates, states, *batch.scans), gate)

        def advance(
            q: Tensor, k: Tensor, v: Tensor, enter: Tensor, forget: Tensor, *slots: Tensor
        ) -> Tensor:
            gates = self._gates(enter, forget)
            return mlstm_decode(CellRows(q, k, v), gates, states, *slots)

        return self._finish(batch.wave_by_wave(advance, *rows, enter, forget), gate)

    def _project(self, hidden: Tensor) -> list[Tensor]:
        """q and k [tokens, heads, k_dim], v [tokens, heads, v_dim], the gate [tokens, channels]."""
        heads, keys, values = self.shape.heads, self.shape.k_dim, self.shape.v_dim
        sizes = [heads * dim for dim in (keys, keys, values, values)]
        *rows, gate = self.project_in(hidden).split_with_sizes(sizes, dim=1)
        return [*(row.view(len(row), heads, -1) for row in rows), gate]

    def _gates(self, enter: Tensor, forget: Tensor) -> CellGates:
        return CellGates(enter, forget, self.shape.gate_cap, self.shape.eps)

    def _finish(self, y: Tensor, gate: Tensor) -> Tensor:
        return self.project_out(sigmoid(gate) * self.norm(y).flatten(1))


def load_mlstm(weights: Weights, shape: MlstmShape, place: LayerPlace) -> MlstmMixer:
    """The matrix LSTM with tensors under `weights`: a rank's heads."""
    hidden_dim, group = place.hidden_dim, weights.group
    rank_heads = partial(share_of, heads=shape.heads, group=group)
    key_dim, value_dim = shape.heads * shape.k_dim, shape.heads * shape.v_dim
    ways_in = {"q": key_dim, "k": key_dim, "v": value_dim, "ogate_preact": value_dim}
    parts = [weights.matrix(f"{name}.weight", dim, hidden_dim) for name, dim in ways_in.items()]
    names = "igate_preact", "fgate_preact"
    gates = [weights.matrix(f"{name}.weight", shape.heads, hidden_dim) for name in names]
    biases = [weights.tensor(f"{name}.bias", shape.heads, part=rank_heads) for name in names]
    norm = weights.precise("multihead_norm.weight", value_dim, part=rank_heads)
    out = weights.matrix("out_proj.weight", hidden_dim, value_dim)
    return MlstmMixer(
        layer=place.layer,
        shape=shape.shard(group.num_ranks),
        project_in=join_linear([rank_heads(part) for part in parts]),
        project_gates=join_linear([rank_heads(gate) for gate in gates], torch.cat(biases)),
        norm=CentredHeads(norm.view(-1, shape.v_dim), place.norm_eps),
        project_out=summed_linear(share_of(out, shape.heads, group, axis=1), None, group),
    )
