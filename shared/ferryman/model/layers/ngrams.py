"""N-grams of the last tokens, which a layer adds to each of its residual streams (Qwen 4).

e       = table[n-gram rows of the token], joined                        (`ngram_hashes.py`)
k, v    = e · Wk, by stream;  e · Wv
y, z    = v by the gate of each stream's key, and its norm               (`keyed_value.py`)
streams ← streams + y + silu(conv(z))         conv over every `order`-th of the last tokens

The state is what the next token needs of the last ones: inputs of the convolution, and token ids,
as bytes in channels of the same slot. The ids' bytes go through the same kernel, by taps of one and
zero, which change no bit; the ids are stored relative to the separator, so that a slot of zeros
stands for the start of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman.errors import ConfigError
from ferryman.model.layers.convolved_attention import ChannelConv
from ferryman.model.layers.decoder_layers import Layer, LayerPlace
from ferryman.model.layers.ngram_hashes import NgramHashes, multipliers_of, rows_of_heads
from ferryman.model.shapes.batch import StepBatch
from ferryman.model.shapes.ngram_shapes import ID_BYTES, NgramShape
from ferryman.model.shapes.ranks import Group
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.linear import Linear, SummedLinear
from ferryman.model.weights.matrix import join_linear
from ferryman.model.weights.named_weights import Weights, accumulation_dtype
from ferryman_kernels.elementwise.activations import silu
from ferryman_kernels.elementwise.streams.keyed_value import StreamNorms, keyed_value

BYTE = 8
MULTIPLIERS = "layer_multipliers"
SIZES, OFFSETS = "ngram_heads_vocab_sizes", "ngram_heads_offsets"


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The ids of the last tokens. `delays` has a channel for each byte at each distance."""

    delays: ChannelConv
    separator: int

    def __call__(self, token_ids: Tensor, states: Tensor, batch: StepBatch) -> list[Tensor]:
        """`token_ids` [tokens], then the ids one token ago, two and so on: as far as the last
        separator, which stands for all before it. `states` [slots, channels, depth] are read and
        advanced."""
        marked = token_ids ^ self.separator
        parts = torch.stack([(marked >> BYTE * at) & 255 for at in range(ID_BYTES)], dim=1)
        copies = parts.repeat(1, states.shape[1] // ID_BYTES).to(states.dtype)
        earlier = self.delays(copies, states, batch).to(token_ids.dtype)
        ids, is_near = [token_ids], torch.ones_like(token_ids, dtype=torch.bool)
        for parts in earlier.view(len(token_ids), -1, ID_BYTES).unbind(1):
            mark = parts[:, 0]
            for at in range(1, ID_BYTES):
                mark = mark | (parts[:, at] << BYTE * at)
            # A mark of zero is the separator itself.
            is_near = is_near & (mark != 0)
            ids.append(torch.where(is_near, mark, 0) ^ self.separator)
        return ids


@dataclass(frozen=True, slots=True)
class NgramTable:
    """A rank's `heads` of the hashes, and their rows in `table` [rows, head_dim]."""

    hashes: NgramHashes
    heads: slice
    table: Tensor

    def __call__(self, ids: list[Tensor]) -> Tensor:
        """The rows of a rank's heads side by side, [tokens, heads · head_dim]."""
        return F.embedding(self.hashes(ids)[:, self.heads], self.table).flatten(1)


@dataclass(frozen=True, slots=True)
class Ngrams:
    """The n-grams of layer `layer`. `projected` yields the keys of all streams, then the value."""

    layer: int
    last_tokens: LastTokens
    table: NgramTable
    projected: Linear
    norms: StreamNorms
    conv: ChannelConv

    def added(self, streams: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        """`streams` [tokens, streams, dim] with what their tokens' n-grams add."""
        row_dim = streams[0].numel()
        rows, id_bytes = state.ngram[self.layer].tensor_split((row_dim,), dim=1)
        taken, normed = self._taken(streams, self.last_tokens(batch.token_ids, id_bytes, batch))
        convolved = silu(self.conv(normed.flatten(1), rows, batch)).view_as(streams)
        return streams + (taken + convolved)

    def _taken(self, streams: Tensor, ids: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The value of `ids` as far as the streams take it, and its norm, shaped as they are."""
        keys, value = self.projected(self.table(ids)).tensor_split((streams[0].numel(),), dim=1)
        return keyed_value(keys.reshape(streams.shape), streams, value.contiguous(), self.norms)


@dataclass(frozen=True, slots=True)
class NgramLayer:
    """A layer whose streams get n-grams first."""

    ngrams: Ngrams
    inner: Layer

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        return self.inner.forward(self.ngrams.added(hidden, batch, state), batch, state)


def load_ngrams(weights: Weights, shape: NgramShape, place: LayerPlace) -> Ngrams:
    """The n-grams under `weights`. A rank has a share of the tables and sums what it finds there;
    all else is on every rank."""
    delays = delays_of(shape.order, shape.depth, accumulation_dtype(weights.dtype))
    return Ngrams(
        layer=place.layer,
        last_tokens=LastTokens(ChannelConv(delays.to(weights.device), None), shape.separator),
        table=_load_table(weights.under("ple_embedding"), shape),
        projected=_load_products(weights, shape),
        norms=_load_norms(weights, shape, place),
        conv=_load_conv(weights, shape),
    )


def delays_of(order: int, depth: int, dtype: torch.dtype) -> Tensor:
    """Taps [channels, depth + 1] of one at the distance of each copy of a token's bytes."""
    taps = torch.zeros(order - 1, ID_BYTES, depth + 1, dtype=dtype)
    for ago in range(1, order):
        taps[ago - 1, :, depth - ago] = 1.0
    return taps.flatten(0, 1)


def _load_conv(weights: Weights, shape: NgramShape) -> ChannelConv:
    """The taps at their distance; those between are zero."""
    stored = weights.precise("conv1d.weight", shape.row_dim, 1, shape.conv_taps)
    taps = stored.new_zeros(shape.row_dim, shape.depth + 1)
    taps[:, :: shape.order] = stored[:, 0]
    return ChannelConv(taps, None)


def _load_norms(weights: Weights, shape: NgramShape, place: LayerPlace) -> StreamNorms:
    key, stream, taken = (
        weights.precise(f"{name}.weight", shape.row_dim).view(shape.streams, -1) + place.norm_origin
        for name in ("norm_key", "norm_query", "norm_conv")
    )
    return StreamNorms(key, stream, taken, place.norm_eps)


def _heads_of_rank(shape: NgramShape, group: Group) -> slice:
    """A rank's heads: a share of them, or all if ranks do not divide them."""
    if shape.all_heads % group.num_ranks:
        return slice(0, shape.all_heads)
    length = shape.all_heads // group.num_ranks
    return slice(group.rank * length, (group.rank + 1) * length)


def _load_products(weights: Weights, shape: NgramShape) -> Linear:
    heads = _heads_of_rank(shape, weights.group)
    start, length = heads.start * shape.head_dim, (heads.stop - heads.start) * shape.head_dim
    sizes = {"key_proj": shape.row_dim, "value_proj": shape.hidden_dim}
    joined = join_linear(
        [
            weights.matrix(f"{name}.weight", size, shape.embed_dim).narrow(1, start, length)
            for name, size in sizes.items()
        ]
    )
    return joined if length == shape.embed_dim else SummedLinear(joined, weights.group)


def _load_table(weights: Weights, shape: NgramShape) -> NgramTable:
    """Tables have the rows that follow from the config, which are those of the checkpoint. The
    multipliers are a checkpoint's own if it has them."""
    tables, heads = rows_of_heads(shape), _heads_of_rank(shape, weights.group)
    _check_rows(weights, tables)
    rows = range(tables[heads][0].start, tables[heads][-1].stop)
    place = weights.device
    multipliers = torch.tensor(multipliers_of(shape))
    if weights.has(MULTIPLIERS):
        multipliers = weights.stored(MULTIPLIERS, (shape.order,), ("I64",)).clone()
    hashes = NgramHashes(
        multipliers.to(place),
        torch.tensor([len(table) for table in tables]).to(place),
        torch.tensor([table.start - rows.start for table in tables]).to(place),
    )
    return NgramTable(hashes, heads, _read_rows(weights, shape, tables[-1].stop, rows))


def _check_rows(weights: Weights, tables: tuple[range, ...]) -> None:
    """Raises ConfigError if the checkpoint names other tables than follow from its config."""
    implied = {
        SIZES: [len(table) for table in tables],
        OFFSETS: [table.start for table in tables],
    }
    for name, numbers in implied.items():
        if not weights.has(name):
            continue
        stored = weights.stored(name, (len(tables),), ("I64",))
        # A checkpoint that is sized alone has shapes in place of numbers.
        if not stored.is_meta and not are_numbers(stored, numbers):
            raise ConfigError(
                f"{weights.checkpoint.folder}: {name} are {stored.tolist()} in the"
                f" checkpoint, but ngram_vocab_size_base in config.json implies {numbers}"
            )


def are_numbers(stored: Tensor, numbers: list[int]) -> bool:
    """Whether the tensor holds these numbers."""
    return stored.tolist() == numbers


def _read_rows(weights: Weights, shape: NgramShape, num_used: int, rows: range) -> Tensor:
    """Some rows of the joint table, which is one tensor or many of equal length. Each is copied to
    its place: published ones have 100 GB together."""
    under = weights.under("ngram_embedding")
    num_rows = -(-num_used // shape.row_multiple) * shape.row_multiple
    names, length = ["weight"], num_rows
    if not under.has("weight"):
        length, odd = divmod(num_rows, shape.table_parts)
        names = [f"shard_{number}.weight" for number in range(shape.table_parts)]
        if odd:
            raise ConfigError(
                f"{weights.checkpoint.folder}: split_ngram_parts {shape.table_parts} in config.json"
                f" does not divide the {num_rows} rows of the n-gram table"
            )
    table = torch.empty(len(rows), shape.head_dim, dtype=weights.dtype, device=weights.device)
    for number, name in enumerate(names):
        low, high = (max(rows.start, number * length), min(rows.stop, (number + 1) * length))
        if low < high:
            part = partial(torch.narrow, dim=0, start=low - number * length, length=high - low)
            read = under.tensor(name, length, shape.head_dim, part=part)
            table[low - rows.start : high - rows.start] = read
    return table
