"""The state manifest of a model: what its layers keep in a slot of each kind, and where."""

from __future__ import annotations

from ferryman.cache.manifest import Kind, KindLayout, StateManifest, lay_out
from ferryman.errors import ConfigError
from ferryman.model.shapes import AttentionShape, ModelConfig, StatePlace, share_of_rank

MAX_SCAN_CHUNK = 64


def state_manifest(
    config: ModelConfig, dtype: str, page_size: int, fingerprint: str, num_ranks: int = 1
) -> StateManifest:
    """What `config` keeps per page and per recurrent slot, in `dtype`; in one of `num_ranks`.

    Raises ConfigError for windows of different lengths: their pages would be freed together; and
    for heads that so many ranks cannot share.
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
    shapes = [shape for layer in config.states for shape in layer]
    lengths = {s.window_len for s in shapes if isinstance(s, AttentionShape) and s.window_len}
    if len(lengths) > 1:
        raise ConfigError(
            f"windows of different lengths in one model are not supported: {sorted(lengths)}"
        )
    return max(lengths, default=0)
