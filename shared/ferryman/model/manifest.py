"""The state manifest of a model: the sections of its layers in a slot of each kind."""

from __future__ import annotations

from ferryman.cache.manifest import Kind, KindLayout, StateManifest, lay_out
from ferryman.model.attention_shapes import AttentionShape
from ferryman.model.shapes import ModelConfig, StatePlace, share_of_rank

MAX_SCAN_CHUNK = 64


def state_manifest(
    config: ModelConfig, dtype: str, page_size: int, fingerprint: str, num_ranks: int = 1
) -> StateManifest:
    """The state of `config` per page and per recurrent slot in `dtype`, on one of `num_ranks`
    ranks.

    Raises ConfigError for heads that `num_ranks` cannot divide.
    """
    return StateManifest(
        fingerprint=fingerprint,
        page_size=page_size,
        scan_chunk=min(page_size, MAX_SCAN_CHUNK),
        window_len=_window_len(config),
        layouts=_layouts(config, dtype, page_size, num_ranks),
    )


def _layouts(
    config: ModelConfig, dtype: str, page_size: int, num_ranks: int
) -> tuple[KindLayout, ...]:
    """One layout for each kind that any layer has, the layers in their order."""
    placed = [
        (shape.kind, share_of_rank(shape, num_ranks).sections(StatePlace(layer, page_size, dtype)))
        for layer, shapes in enumerate(config.states)
        for shape in shapes
    ]
    by_kind = {kind: [s for k, specs in placed if k is kind for s in specs] for kind in Kind}
    return tuple(lay_out(kind, specs) for kind, specs in by_kind.items() if specs)


def _window_len(config: ModelConfig) -> int:
    """The longest window or chunk: pages of the kind are freed together, behind it. A layer with a
    shorter one reads less of them."""
    shapes = [shape for layer in config.states for shape in layer]
    return max((s.reach for s in shapes if isinstance(s, AttentionShape)), default=0)
