"""The state manifest of a model: the sections of its layers in a slot of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol, runtime_checkable

from ferryman.cache.manifest import (
    ANY_ARITHMETIC,
    Exactness,
    Kind,
    KindLayout,
    StateManifest,
    lay_out,
)
from ferryman.errors import ConfigError
from ferryman.model.shapes.attention_shapes import (
    AttentionShape,
    BlockIndexShape,
    DistanceShape,
    LatentShape,
)
from ferryman.model.shapes.model_shapes import AS_COMPUTED, ModelConfig, StatePlace, share_of_rank
from ferryman.model.shapes.row_shapes import BlockRowsShape, MeanIndexShape, RowAttentionShape

SCAN_BLOCK = 64


def state_manifest(
    config: ModelConfig,
    dtype: str,
    page_size: int,
    fingerprint: str,
    num_ranks: int = 1,
    kv_dtype: str = AS_COMPUTED,
    arithmetic: str = ANY_ARITHMETIC,
) -> StateManifest:
    """The state of `config` per page and per recurrent slot in `dtype`, on one of `num_ranks`
    ranks. `arithmetic` is that of the whole model, also for the share of a rank.

    Raises ConfigError for heads that `num_ranks` cannot divide, and for a `kv_dtype` if no layer
    keeps keys and values.
    """
    if kv_dtype != AS_COMPUTED and not any(attentions(config)):
        raise ConfigError(f"kv_dtype={kv_dtype}: no layer of this model keeps keys and values")
    return StateManifest(
        fingerprint=fingerprint,
        page_size=page_size,
        scan_chunk=_scan_chunk(page_size, arithmetic),
        window_len=_window_len(config),
        layouts=_layouts(config, StatePlace(0, page_size, dtype, kv_dtype), num_ranks),
        arithmetic=arithmetic,
    )


def check_kv_dtype(config: ModelConfig, kv_dtype: str, *, on_card: bool) -> None:
    """Raises ConfigError for pages of codes that a card's attention would have to copy whole.

    Attention to chosen blocks reads parts of pages, whose codes and scales no table names alike. A
    card opens a copy of a page for each entry of a table: 8 GiB a layer of MiniMax M3 for 32 rows
    of 131,072 tokens. A processor opens a page once, however many rows share it.
    """
    if on_card and kv_dtype != AS_COMPUTED and chooses_blocks(config):
        raise ConfigError(
            f"kv_dtype={kv_dtype}: on a card attention to chosen blocks cannot read pages of codes;"
            f" choose kv_dtype={AS_COMPUTED}"
        )


def scan_block(manifest: StateManifest) -> int:
    """Tokens of the blocks in which recurrences are scanned: one where bits are promised, since a
    scan token by token can be cut anywhere. Elsewhere a block may be longer than a page: what cuts
    it changes its last bits, which nobody promised."""
    return 1 if manifest.exactness is Exactness.BITS else SCAN_BLOCK


def _scan_chunk(page_size: int, arithmetic: str) -> int:
    return 1 if Exactness.under(arithmetic) is Exactness.BITS else min(page_size, SCAN_BLOCK)


def _layouts(config: ModelConfig, place: StatePlace, num_ranks: int) -> tuple[KindLayout, ...]:
    """One layout for each kind that any layer has, the layers in their order."""
    placed = [
        (shape.kind, share_of_rank(shape, num_ranks).sections(replace(place, layer=layer)))
        for layer, shapes in enumerate(config.states)
        for shape in shapes
    ]
    by_kind = {kind: [s for k, specs in placed if k is kind for s in specs] for kind in Kind}
    return tuple(lay_out(kind, specs) for kind, specs in by_kind.items() if specs)


def _window_len(config: ModelConfig) -> int:
    """The longest window or chunk: older pages of the kind are freed together. A layer with a
    shorter one reads less of them."""
    shapes = (shape for states in config.states for shape in states)
    paged = AttentionShape | LatentShape | RowAttentionShape
    reaches = [s.reach for s in shapes if isinstance(s, paged)]
    return max(reaches, default=0)


def pads_prompts(config: ModelConfig) -> bool:
    """Whether all layers take a chunk with padding behind it on a card. Attention over latents and
    attention within chunks do not: they cut a prompt by its positions on the host. Rows of blocks
    do not, because each token lists those that the table has room for: a padded chunk's table has
    room for the longest prompt, 8,192 rows of 128 tokens for 1,048,576."""
    shapes = [shape for states in config.states for shape in states]
    return not any(
        isinstance(shape, LatentShape | BlockRowsShape)
        or (isinstance(shape, AttentionShape) and shape.chunk_len)
        for shape in shapes
    )


def chooses_blocks(config: ModelConfig) -> bool:
    """Whether a layer attends to blocks of keys that an index chooses."""
    shapes = (shape for states in config.states for shape in states)
    return any(isinstance(shape, BlockIndexShape | MeanIndexShape) for shape in shapes)


def attentions(config: ModelConfig) -> Iterator[AttentionShape]:
    """The layers' attention over pages of keys and values; latents and indices are others."""
    for layer in config.states:
        yield from (shape for shape in layer if isinstance(shape, AttentionShape))


@runtime_checkable
class ProfiledConfig(Protocol):
    """The config of a model whose scores have terms of distance: one shape for each layer."""

    @property
    def attentions(self) -> tuple[AttentionShape, ...]: ...

    @property
    def distances(self) -> tuple[DistanceShape, ...]: ...


def profile_len(config: ModelConfig, num_ranks: int) -> int:
    """The most numbers that the profiles of one token have in a layer, on one of `num_ranks` ranks;
    0 for a model without profiles of distance."""
    if not isinstance(config, ProfiledConfig):
        return 0
    layers = zip(config.attentions, config.distances, strict=True)
    return max(shape.shard(num_ranks).q_heads * term.extent for shape, term in layers)


class CountedStreams(Protocol):
    """Residual streams, in any of their shapes."""

    @property
    def count(self) -> int: ...


@runtime_checkable
class StreamedConfig(Protocol):
    """The config of a model whose residual path has several streams."""

    @property
    def streams(self) -> CountedStreams: ...


def num_streams(config: ModelConfig) -> int:
    """The residual streams of a token; 0 for a model whose path is the hidden state alone."""
    return config.streams.count if isinstance(config, StreamedConfig) else 0
