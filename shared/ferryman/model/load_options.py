"""The options of a load: all that decides what a folder of weights becomes in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ferryman.cache.manifest import ANY_ARITHMETIC
from ferryman.errors import ConfigError
from ferryman.model.config import load_format
from ferryman.model.shapes.model_shapes import AS_COMPUTED
from ferryman.model.shapes.ranks import SINGLE_RANK, Group
from ferryman.model.weights.checkpoint import Checkpoint
from ferryman.model.weights.load_progress import ProgressListener, unheard
from ferryman.model.weights.lora import LoraWeights, read_adapters
from ferryman.model.weights.named_weights import (
    FLOATS,
    OnRead,
    WeightFormat,
    Weights,
    torch_dtype,
    uncounted,
)
from ferryman.model.weights.quantisation.gguf_blocks import GgufBlocks, keeps_blocks
from ferryman.model.weights.weight_formats import AS_STORED


def torch_device(device: torch.device | str) -> torch.device:
    """A processor, a card, or torch's meta device. Raises ConfigError, by name, for others and for
    a card that is not there."""
    kind, _, index = str(device).partition(":")
    if kind not in ("cpu", "cuda", "meta"):
        raise ConfigError(f"device {device} is not supported; supported are cpu and cuda")
    cards = [f"cuda:{card}" for card in range(torch.cuda.device_count())]
    if kind == "cuda" and f"cuda:{index or 0}" not in cards:
        raise ConfigError(
            f"device {device}: there is no such card here; there are {', '.join(cards) or 'none'}"
        )
    return torch.device(device)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The same for a model, its draft and its own drafting layer, and on all ranks of `group`.

    `dtype` and `quantize` are names as in `EngineOptions`: with `quantize` "int8" the weights of
    linear layers become int8, with "none" they stay as they are stored. `page_size` is in tokens.
    `on_progress` gets how far a load is. `lora` has the folders of the adapters by name.
    `kv_dtype` is how keys and values are kept, `arithmetic` that of the whole model's state: on a
    card products have one order where it promises bits.
    """

    dtype: str
    device: torch.device | str = "cpu"
    page_size: int = 64
    group: Group = SINGLE_RANK
    quantize: str = AS_STORED
    on_progress: ProgressListener = unheard
    lora: Mapping[str, Path] = field(default_factory=dict)
    kv_dtype: str = AS_COMPUTED
    arithmetic: str = ANY_ARITHMETIC

    def format_of(self, folder: Path | str) -> WeightFormat:
        """The format in which the model in `folder` keeps its weights.

        Raises ConfigError, by name, for one that is not supported.
        """
        stored = load_format(folder, self.quantize)
        if stored != FLOATS:
            return stored
        is_kept = keeps_blocks(Path(folder), self.device, torch_dtype(self.dtype))
        return GgufBlocks() if is_kept else stored

    def weights(self, checkpoint: Checkpoint, on_read: OnRead = uncounted) -> Weights:
        """The rank's weights, from `checkpoint` onto the device, none of them read.

        Raises ConfigError as `format_of`, and for a dtype or a device that cannot run it.
        """
        return Weights(
            checkpoint,
            torch_dtype(self.dtype),
            torch_device(self.device),
            group=self.group,
            format=self.format_of(checkpoint.folder),
            on_read=on_read,
            lora=LoraWeights(read_adapters(self.lora)) if self.lora else None,
        )
