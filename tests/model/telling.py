"""One tiny model of each family, with as many kinds of state as the family has."""

from __future__ import annotations

from pathlib import Path

from tests.model.comparison import FAMILIES, architecture_of, random_config
from tests.native import native_config, save_native
from tests.tiny_models import save_random
from transformers import PretrainedConfig

from ferryman.cache.manifest import StateManifest
from ferryman.errors import ConfigError
from ferryman.model.config import load_config
from ferryman.model.shapes.manifest import state_manifest
from ferryman.model.shapes.model_shapes import ModelConfig

NATIVE = "native"
ALL_FAMILIES = (*FAMILIES, NATIVE)
SEEDS = range(12)
SEEDS_FOR_RANKS = range(60)
"""Many are needed: most random configs have a number of heads that ranks cannot share."""


def save_telling(
    folder: Path, family: str, page_size: int, page_end: int, *, num_ranks: int = 1
) -> Path:
    """Writes a model whose answer at `page_end` depends on all of its state."""
    if family == NATIVE:
        return save_native(folder, native_config())
    manifests = {
        seed: _manifest(folder, family, seed, page_size)
        for seed in (SEEDS if num_ranks == 1 else SEEDS_FOR_RANKS)
        if _is_shared_by(folder, family, seed, num_ranks)
    }
    telling = {
        seed: len(manifest.kinds)
        for seed, manifest in manifests.items()
        if _is_telling(random_config(family, seed), manifest, page_end)
    }
    assert telling, f"no random model of {family} is telling with this transformers and torch"
    seed = max(telling, key=telling.__getitem__)
    return save_random(folder, random_config(family, seed), seed)


def _manifest(folder: Path, family: str, seed: int, page_size: int) -> StateManifest:
    return state_manifest(_config(folder, family, seed), "float64", page_size, "")


def _is_shared_by(folder: Path, family: str, seed: int, num_ranks: int) -> bool:
    try:
        state_manifest(_config(folder, family, seed), "float64", 16, "", num_ranks)
    except ConfigError:
        return False
    return True


def _config(folder: Path, family: str, seed: int) -> ModelConfig:
    config = random_config(family, seed)
    config.architectures = [architecture_of(config)]
    config.save_pretrained(folder)
    return load_config(folder)


def _is_telling(config: PretrainedConfig, manifest: StateManifest, page_end: int) -> bool:
    """False for an index that chooses all, for a window of one position, and for a model that looks
    up n-grams in no layer though others of its family do."""
    if not getattr(config, "ple_layer_ids", True):
        return False
    chosen = max(getattr(config, name, 0) for name in ("index_topk", "indexer_budget"))
    blocks = getattr(config, "index_topk_blocks", 0) * getattr(config, "index_block_size", 0)
    return manifest.window_len != 1 and max(chosen, blocks) < page_end / 2
