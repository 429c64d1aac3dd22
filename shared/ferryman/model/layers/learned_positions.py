"""Positions that a model has learned: a row of a table for each, added to the embedding (GPT-2)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from ferryman.model.layers.decoder_layers import Layer
from ferryman.model.shapes.batch import StepBatch
from ferryman.model.shapes.state import ModelState


@dataclass(frozen=True, slots=True)
class LearnedPositionsLayer:
    """The first layer of such a model. `table` [positions, hidden_dim] in the model's dtype.

    Padding, and a draft that would pass the last position, have the nearest row: neither is ever
    an answer.
    """

    table: Tensor
    inner: Layer

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        rows = batch.positions.clamp(0, len(self.table) - 1)
        return self.inner.forward(hidden + F.embedding(rows, self.table), batch, state)
