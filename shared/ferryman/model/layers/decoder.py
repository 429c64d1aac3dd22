"""The decoder that all families share: embedding, layers, norm, head.

hidden = embed(tokens) · embedding_multiplier
hidden = layer(hidden)                             for each layer
logits = norm(hidden) · Whead / logits_scaling     (capped: cap · tanh(logits / cap))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ferryman.cache.manifest import StateManifest
from ferryman.model.layers.decoder_layers import (
    DecoderLayer,
    Layer,
    LayerPlace,
    Norm,
    NormLoader,
    OpenSum,
    load_norm,
)
from ferryman.model.sampling.prompt_logprobs import PrefilledRows
from ferryman.model.shapes.batch import DecodeBatch, PrefillBatch, StepBatch
from ferryman.model.shapes.manifest import scan_block
from ferryman.model.shapes.model_shapes import ModelConfig, TrunkShape
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.adapted import ServedAdapters
from ferryman.model.weights.linear import Linear
from ferryman.model.weights.named_weights import Weights, accumulation_dtype
from ferryman.model.weights.token_table import Embedding, load_embedding, load_head

P = TypeVar("P")
T = TypeVar("T")


class Model(Protocol):
    """The model as the engine runs it. Both forwards advance `state` in place.

    Logits come in the accumulation dtype: float64 for a float64 model, float32 otherwise.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def manifest(self) -> StateManifest: ...

    def prefill(self, batch: PrefillBatch, state: ModelState) -> PrefilledRows:
        """The hidden states of all tokens; the logits [rows, vocab] of any are made of them."""
        ...

    def decode(self, batch: DecodeBatch, state: ModelState) -> Tensor:
        """Logits [requests, vocab]."""
        ...


@dataclass(frozen=True, slots=True)
class EndScales:
    """A family's multipliers at the ends of the decoder, and the cap of its logits (0: none)."""

    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    logits_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class EmbeddingAndHead:
    """The two ends of a decoder: from token ids to hidden states, from those to logits."""

    embedding: Embedding
    norm: Norm
    head: Linear
    scales: EndScales

    def embed(self, token_ids: Tensor) -> Tensor:
        hidden = self.embedding(token_ids)
        multiplier = self.scales.embedding_multiplier
        return hidden if multiplier == 1.0 else hidden.mul_(multiplier)

    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, vocab], in the accumulation dtype."""
        return self.logits_of_normed(self.norm(hidden))

    def logits_of_normed(self, normed: Tensor) -> Tensor:
        """The `logits` of hidden states that went through the final norm, or another one."""
        scores = self.head(normed.to(self.embedding.dtype))
        logits = scores.to(accumulation_dtype(scores.dtype))
        scaling, cap = self.scales.logits_scaling, self.scales.logits_cap
        if scaling != 1.0:  # a pass over all logits of a step
            logits = logits.div_(scaling)
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model of any family, made of its layers."""

    config: ModelConfig
    manifest: StateManifest
    ends: EmbeddingAndHead
    layers: tuple[Layer, ...]
    lora: ServedAdapters | None = None

    @property
    def vocab_size(self) -> int:
        return self.config.trunk.vocab_size

    @property
    def device(self) -> torch.device:
        return self.ends.embedding.device

    @torch.inference_mode()
    def prefill(self, batch: PrefillBatch, state: ModelState) -> PrefilledRows:
        return PrefilledRows(self.hidden_states(batch, state), self.ends.logits)

    @torch.inference_mode()
    def decode(self, batch: DecodeBatch, state: ModelState) -> Tensor:
        return self.ends.logits(self.hidden_states(batch, state))

    def hidden_states(self, batch: StepBatch, state: ModelState) -> Tensor:
        """The hidden states of all tokens before the final norm: [tokens, hidden_dim]."""
        self._select_adapters(batch)
        hidden: Tensor | OpenSum = self.ends.embed(batch.token_ids)
        for layer in self.layers:
            # The next layer's norm adds what this one leaves open: one kernel in place of two.
            if isinstance(layer, DecoderLayer):
                hidden = layer.left_open(hidden, batch, state)
            else:
                hidden = layer.forward(_closed(hidden), batch, state)
            state.layers_run.num_done += 1
        return _closed(hidden)

    def _select_adapters(self, batch: StepBatch) -> None:
        """Gives the adapted layers, which see only their rows, the adapter of each row."""
        if self.lora is not None:
            self.lora.active.select(batch.adapters, len(batch.token_ids))


def _closed(hidden: Tensor | OpenSum) -> Tensor:
    return hidden.closed() if isinstance(hidden, OpenSum) else hidden


def load_decoder(
    config: ModelConfig,
    manifest: StateManifest,
    ends: EmbeddingAndHead,
    layers: Weights,
    load_layer: Callable[[Weights, LayerPlace], Layer],
    norm_origin: float = 0.0,
) -> Decoder:
    """The decoder of `config` between its ends. `load_layer` makes each layer from the weights
    under its number in `layers` and from its place."""
    loaded = load_layers(config, manifest, layers, load_layer, norm_origin)
    return Decoder(config, manifest, ends, loaded)


def load_model_decoder(
    config: ModelConfig,
    manifest: StateManifest,
    weights: Weights,
    load_layer: Callable[[Weights, LayerPlace], Layer],
    scales: EndScales,
    *,
    final_norm: str = "norm",
) -> Decoder:
    """The decoder of `config` with all tensors but the head's under "model"."""
    ends = load_embedding_and_head(weights, config.trunk, f"model.{final_norm}.weight", scales)
    return load_decoder(config, manifest, ends, weights.under("model.layers"), load_layer)


def load_layers(
    config: ModelConfig,
    manifest: StateManifest,
    layers: Weights,
    load_layer: Callable[[Weights, LayerPlace], T],
    norm_origin: float = 0.0,
) -> tuple[T, ...]:
    """The result of `load_layer` for each layer, by the weights under its number and its place."""
    places = places_of(config, manifest, norm_origin)
    return side_by_side(lambda place: load_layer(layers.under(str(place.layer)), place), places)


def load_halved_layers(
    config: ModelConfig,
    manifest: StateManifest,
    layers: Weights,
    load_layer: Callable[[Weights, tuple[LayerPlace, LayerPlace]], T],
) -> tuple[T, ...]:
    """The result of `load_layer` for each two layers of `config`, which a checkpoint has under one
    number, and their places."""
    places = places_of(config, manifest)
    pairs = tuple(zip(places[0::2], places[1::2], strict=True))
    return side_by_side(lambda pair: load_layer(layers.under(str(pair[0].layer // 2)), pair), pairs)


def places_of(
    config: ModelConfig, manifest: StateManifest, norm_origin: float = 0.0
) -> tuple[LayerPlace, ...]:
    """The places of all layers."""
    trunk = config.trunk
    return tuple(
        LayerPlace(index, trunk.hidden_dim, trunk.norm_eps, scan_block(manifest), norm_origin)
        for index in range(trunk.num_layers)
    )


def side_by_side(load: Callable[[P], T], places: Sequence[P]) -> tuple[T, ...]:
    """The results of `load` for all places. Raises the first error, in the order of places.

    Each is loaded by one thread, and each operation of torch runs in one thread. The copies of a
    layer are too small for several: on a busy machine they would wait for each other at each one.
    """
    with (
        _single_threaded_operations() as num_threads,
        ThreadPoolExecutor(num_threads, "layer-loader") as pool,
    ):
        contexts = [copy_context() for _ in places]  # weights lie in the caller's regions
        return tuple(pool.map(lambda context, place: context.run(load, place), contexts, places))


@contextmanager
def _single_threaded_operations() -> Iterator[int]:
    """Yields the number of threads that torch's operations have otherwise."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield num_threads
    finally:
        torch.set_num_threads(num_threads)


def load_embedding_and_head(
    weights: Weights,
    trunk: TrunkShape,
    final_norm: str,
    scales: EndScales,
    *,
    embedded: str = "model.embed_tokens.weight",
    load_norm: NormLoader = load_norm,
) -> EmbeddingAndHead:
    """Embedding, final norm and head; a tied head multiplies by the embedding."""
    embedding = load_embedding(weights, embedded, trunk)
    head = load_head(weights, embedding, trunk)
    norm = load_norm(weights, final_norm.removesuffix(".weight"), trunk.hidden_dim, trunk.norm_eps)
    return EmbeddingAndHead(embedding, norm, head, scales)
