"""The model of a measurement: a shape with random weights, or a folder that somebody has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ferryman.model.config import load_config
from ferryman_bench.random_model import make_random_model, write_tokenizer
from ferryman_bench.shape import VOCAB_SIZE, shape_named


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model's folder, ready to be served; prompts have token ids below `vocab_size`."""

    folder: Path
    title: str
    vocab_size: int


@dataclass(frozen=True, slots=True)
class RandomModel:
    """Random weights in one of the bench's shapes."""

    shape: str

    def prepared(self, dtype: str, scratch: Path) -> PreparedModel:
        """Makes it in `scratch`. Raises ConfigError for an unknown shape."""
        millions = make_random_model(shape_named(self.shape), dtype, scratch) / 1e6
        write_tokenizer(scratch)
        return PreparedModel(scratch, f"{self.shape}, {millions:.1f} M parameters", VOCAB_SIZE)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder with a model and its tokenizer, as `ferryman up --model` takes it."""

    path: Path

    def prepared(self, dtype: str, scratch: Path) -> PreparedModel:
        """Raises ConfigError for a folder that cannot be served."""
        config = load_config(self.path)
        return PreparedModel(self.path, self.path.resolve().name, config.trunk.vocab_size)
