"""The layer for multi-token prediction that some checkpoints bring: it drafts for its own model.

    x[t]     = fuse(norm(embedding of token t), norm(hidden[t - 1]))
    y[t]     = norm(layer(x)[t])                     attention over the entries of 1 … t
    logits   = head(y[t])                            of the token at t + 1

`hidden` is the model's last hidden state after its final norm. Embedding and head are the model's.
For a second draft, y[t] takes the place of hidden[t], which no forward has computed yet.

DeepSeek-V3 (2024) describes it; the order of the two halves, the norms and the recursion are those
of vLLM's and SGLang's code for DeepSeek-V3, Qwen3-Next, Qwen3.5 and Nemotron-H. They number an
entry by the position of its hidden state. Here it has the position of its token, so a page holds
only what its own tokens and earlier ones determine. Rotary positions are relative, so scores are
the same.

Position 0 has no hidden state before it and is no entry: its x is zero, so that its key and value
are zero (or biases). It adds a score of 0 without a value to a softmax, which published code has
not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ferryman.cache.manifest import Kind, SectionSpec
from ferryman.errors import ConfigError
from ferryman.model.layers.decoder_layers import DecoderLayer, LayerPlace, RmsNorm, load_norm
from ferryman.model.shapes.attention_shapes import AttentionShape
from ferryman.model.shapes.batch import DecodeBatch, StepBatch
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.model_shapes import ModelConfig, StatePlace, StateShape
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear
from ferryman.model.weights.named_weights import Weights

Config = TypeVar("Config", bound=ModelConfig)


@dataclass(frozen=True, slots=True)
class HiddenShape:
    """The last token's hidden state, kept as a recurrent state: the next entry is made of it."""

    hidden_dim: int

    @property
    def kind(self) -> Kind:
        return Kind.RECURRENT

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        shape = (self.hidden_dim,)
        return (SectionSpec("hidden", place.layer, shape, place.dtype, shard_axis=None),)


@dataclass(frozen=True, slots=True)
class EntryInput:
    """Makes x of embeddings and of the hidden states before them, both [tokens, hidden_dim]."""

    embedding_norm: RmsNorm
    hidden_norm: RmsNorm
    fuse: Linear

    def __call__(self, embedded: Tensor, before: Tensor, positions: Tensor) -> Tensor:
        x = self.fuse(torch.cat((self.embedding_norm(embedded), self.hidden_norm(before)), dim=1))
        return x.masked_fill_((positions == 0)[:, None], 0.0)


@dataclass(frozen=True, slots=True)
class MtpHead:
    """The layer with its input and its norm. Hidden states are [tokens, hidden_dim]."""

    make_input: EntryInput
    layer: DecoderLayer
    norm: RmsNorm

    def propose(
        self, embedded: Tensor, before: Tensor, batch: DecodeBatch, state: ModelState
    ) -> Tensor:
        """y of a batch with one token of each request, whose entries it writes."""
        x = self.make_input(embedded, before, batch.positions)
        return self.norm(self.layer.forward(x, batch, state))

    def write(self, embedded: Tensor, before: Tensor, batch: StepBatch, state: ModelState) -> None:
        """Writes the entries of a batch's tokens. Nothing is drafted, so the mixer is enough."""
        x = self.make_input(embedded, before, batch.positions)
        self.layer.mixer.forward(self.layer.mixer_norm(x), batch, state)


@dataclass(frozen=True, slots=True)
class MtpSource(Generic[Config]):
    """The layer for multi-token prediction in a family's checkpoints.

    `check` raises ConfigError, by field name, for a config that declares none, or another one
    than `load` reads. `attention` is the shape that keeps the layer's state.
    """

    check: Callable[[ConfigFields], None]
    attention: Callable[[Config], StateShape]
    load: Callable[[Config, Weights, LayerPlace], MtpHead]


def attention_like(states: Iterable[Iterable[StateShape]]) -> AttentionShape:
    """The attention of a model's layers, which its drafting layer has too. Raises ConfigError."""
    for layer in states:
        for shape in layer:
            if isinstance(shape, AttentionShape):
                return shape
    raise ConfigError("--draft mtp needs a model with at least one layer of attention")


def check_one_layer(fields: ConfigFields, name: str, default: int = 0) -> None:
    """Raises ConfigError unless the field `name` counts one drafting layer."""
    if fields.whole(name, default, least=0) != 1:
        raise fields.refusal(name, "1 for --draft mtp")


@dataclass(frozen=True, slots=True)
class MtpNames:
    """A checkpoint's names of the input's parts, under one prefix."""

    embedding_norm: str
    hidden_norm: str
    fuse: str


DEEPSEEK_NAMES = MtpNames("enorm", "hnorm", "eh_proj")
"""Nemotron-H has them too."""
QWEN_NAMES = MtpNames("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc")


def load_entry_input(weights: Weights, names: MtpNames, place: LayerPlace) -> EntryInput:
    """The input under `weights`. Every rank has all of it."""
    dim = place.hidden_dim
    embedding_norm, hidden_norm = (
        load_norm(weights, name, dim, place.norm_eps, place.norm_origin)
        for name in (names.embedding_norm, names.hidden_norm)
    )
    fuse = weights.matrix(f"{names.fuse}.weight", dim, 2 * dim).linear(None)
    return EntryInput(embedding_norm, hidden_norm, fuse)
