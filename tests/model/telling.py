"""One tiny model of each family, with as many kinds of state as the family has."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from tests.model.comparison import FAMILIES, random_config
from tests.native import native_config, save_native
from tests.tiny_models import save_random
from transformers import PretrainedConfig

from ferryman.cache.manifest import StateManifest
from ferryman.model.config import load_config
from ferryman.model.manifest import state_manifest

NATIVE = "native"
ALL_FAMILIES = (*FAMILIES, NATIVE)
SEEDS = range(12)


def save_telling(folder: Path, family: str, page_size: int, page_end: int) -> Path:
    """Writes it; what it answers at `page_end` depends on all of its state."""
    if family == NATIVE:
        return save_native(folder, native_config())
    manifests = {seed: _manifest(folder, family, seed, page_size) for seed in SEEDS}
    telling = [s for s in SEEDS if _is_telling(random_config(family, s), manifests[s], page_end)]
    seed = max(telling, key=lambda seed: len(manifests[seed].kinds))
    return save_random(folder, random_config(family, seed), seed)


def _manifest(folder: Path, family: str, seed: int, page_size: int) -> StateManifest:
    config = random_config(family, seed)
    known = import_module(f"ferryman.model.families.{family}").FAMILY
    config.architectures = list(known.architectures)
    config.save_pretrained(folder)
    return state_manifest(load_config(folder), "float64", page_size, "")


def _is_telling(config: PretrainedConfig, manifest: StateManifest, page_end: int) -> bool:
    """An index that chooses everything shows nothing, nor does a window of one position."""
    return manifest.window_len != 1 and getattr(config, "index_topk", 0) < page_end / 2
