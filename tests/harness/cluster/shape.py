"""The shape of a cluster: its model, the numbers of its workers, the settings of each role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tests.planes import CHOICES
from tests.tiny_models import VOCAB_SIZE, save_tiny_model

from ferryman.cache.manifest import StateManifest
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_drafted, load_model
from ferryman.model.weights.weight_formats import AS_STORED
from ferryman.settings.engine import engine_options
from ferryman.sizing.exactness import arithmetic_of
from ferryman.wire.plane_values import MEMORY

PAGE_SIZE = 16
FAST_PLANE = MEMORY  # of workers of one machine, by default
STARTED = ("decode", "prefill", "both", "hostcache", "router")


def save_served_model(folder: Path, variant: str) -> Path:
    """A tiny model with a tokenizer."""
    save_tiny_model(folder, variant)
    save_words(folder, VOCAB_SIZE)
    return folder


def save_words(folder: Path, vocab_size: int) -> None:
    """Writes a tokenizer: token i is the word `w<i>`."""
    vocab = {f"w{i}": i for i in range(vocab_size)}
    model = tokenizers.models.WordLevel(vocab, unk_token="w0")
    encoder = tokenizers.Tokenizer(model)
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    encoder.save(str(folder / "tokenizer.json"))


@dataclass(frozen=True)
class ClusterShape:
    """The number of workers, and the options of their engines.

    Each of `num_nodes` has a host-cache; the first `worker_nodes` of them have `num_prefill` and
    `num_decode` workers each, and `num_both` that do both. With `has_storage` a node has a folder
    that outlives its processes. A Redis, a host-cache or another node that takes longer than
    `patience_seconds` counts as hung: long enough for a busy machine. `settings` override those of
    a role.
    """

    num_nodes: int = 1
    worker_nodes: int = 1
    has_storage: bool = False
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    num_prefill: int = 1
    num_decode: int = 1
    num_both: int = 0
    overlap: bool = True
    chunk_tokens: int = 32
    max_running: int = 8
    memory_bytes: int = 24 << 20
    dtype: str = "float64"
    patience_seconds: float = 5.0

    def starts(self) -> list[tuple[str, int]]:
        """The role and the node of each process, in the order in which they start."""
        nodes = {"router": 1, "hostcache": self.num_nodes}
        numbers = {"prefill": self.num_prefill, "decode": self.num_decode, "both": self.num_both}
        return [
            (role, node)
            for role in STARTED
            for node in range(nodes.get(role, self.worker_nodes))
            for _ in range(numbers.get(role, 1))
        ]

    def manifest_of(self, model: Path) -> StateManifest:
        """The state that its decode workers keep of a model, or those that do both."""
        chosen = self.settings.get("decode" if self.num_decode else "both", {})
        draft, kv_dtype = chosen.get("draft", "ngram"), chosen.get("kv_dtype", "auto")
        quantize = chosen.get("quantize", AS_STORED)
        names = {"exactness", "kv_dtype", "quantize", "tp_size"} & set(chosen)
        engine = engine_options(
            model=model, dtype=self.dtype, **{name: chosen[name] for name in names}
        )
        options = LoadOptions(
            self.dtype,
            page_size=PAGE_SIZE,
            quantize=quantize,
            kv_dtype=kv_dtype,
            arithmetic=arithmetic_of(engine),
        )
        if draft == "ngram":
            return load_model(model, options).manifest
        return load_drafted(model, draft, options).manifest


def on_plane(plane: str) -> dict[str, dict[str, Any]]:
    """Settings of workers that hand off on one plane alone."""
    return {role: {"planes": CHOICES[plane]} for role in ("prefill", "decode")}
