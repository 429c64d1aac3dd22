"""The models of the table: random tiny ones, random ones of real widths, and published weights.

A random model has random prompts, of which none is a whole number of pages. Every model has what a
user adds after each answer, so that a second and a third turn can follow.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tests.model.comparison import BY_NAME, random_config
from tests.model.mtp_checkpoint import CASES as WITH_OWN_LAYER
from tests.model.mtp_checkpoint import save_with_mtp
from tests.tiny_models import VARIANTS, WITH_WINDOWS, save_random
from tests.variants import NATIVE, save_variant
from tools.bits.wide_models import WIDE
from transformers import PretrainedConfig

from ferryman.model.config import load_config
from tools.bits import smollm2

Prompt = tuple[int, ...]

PAGE_SIZE = 16
MAX_PROMPTS = 20
NUM_TURNS = 2
TINY = (
    "llama",
    "bamba",
    "falcon_h1",
    "nemotron_h",
    "granite_moe_rope",
    "qwen3_next",
    "gpt_oss",
    "gemma3",
    "deepseek_v3",
)
GROUPS = {
    "families": TINY,
    "all": tuple(BY_NAME),
    "wide": tuple(WIDE),
    "smollm2": ("smollm2",),
}
"""Names that stand for several models."""

_PROMPT_LENS = (75, 98, 61, 110, 87, 77)
_TURN_LENS = (19, 11)


@dataclass(frozen=True, slots=True)
class BitsModel:
    """A model's folder and its prompts. `turns` follow the answers, one after the other;
    `has_own_layer` if it can draft with a layer of its own."""

    name: str
    folder: Path
    prompts: tuple[Prompt, ...]
    turns: tuple[Prompt, ...]
    has_own_layer: bool


def named(names: str) -> list[str]:
    """The models that a list with commas means. Raises ValueError for an unknown name."""
    chosen: list[str] = []
    for name in names.split(","):
        chosen += GROUPS.get(name, (name,))
    known = {*BY_NAME, *VARIANTS, *WITH_WINDOWS, *WIDE, *GROUPS}
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(f"no model {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return list(dict.fromkeys(chosen))


@contextmanager
def saved_model(name: str, num_prompts: int) -> Iterator[BitsModel]:
    """The model called `name` in a folder, for the length of a `with`."""
    if name == "smollm2":
        folder = smollm2.made_folder()
        prompts, turns = smollm2.chats(folder, num_prompts, NUM_TURNS)
        yield BitsModel(name, folder, prompts, turns, has_own_layer=False)
        return
    with tempfile.TemporaryDirectory(prefix="ferryman-bits-") as scratch:
        folder = Path(scratch)
        _save(folder, name)
        vocab_size = load_config(folder).trunk.vocab_size
        lengths = [_PROMPT_LENS[row % len(_PROMPT_LENS)] for row in range(num_prompts)]
        yield BitsModel(
            name,
            folder,
            random_prompts("prompt", lengths, vocab_size),
            random_prompts("turn", _TURN_LENS, vocab_size),
            has_own_layer=name in WITH_OWN_LAYER,
        )


def _save(folder: Path, name: str) -> None:
    if name in WIDE:
        save_random(folder, WIDE[name](), seed=0)
    elif name in WITH_OWN_LAYER:
        save_with_mtp(folder, name, is_wanted=has_all_parts)
    elif name == NATIVE or name in VARIANTS or name in WITH_WINDOWS:
        save_variant(folder, name)
    else:
        seed = next(seed for seed in count() if has_all_parts(random_config(name, seed)))
        save_random(folder, random_config(name, seed), seed)


def has_all_parts(config: PretrainedConfig) -> bool:
    """Whether a random config has every kind of layer, and layers after those that mix positions:
    keys of a first layer do not depend on attention."""
    words = getattr(config, "layers_block_type", None) or ["any"] * config.num_hidden_layers
    num_dense = getattr(config, "first_k_dense_replace", 0)
    return len(words) >= max(3, len(set(words))) and num_dense < len(words)


def random_prompts(sort: str, lengths: Sequence[int], vocab_size: int) -> tuple[Prompt, ...]:
    """A prompt of each length. Control tokens, which come first, are not among their tokens."""
    return tuple(
        tuple(random.Random(f"{sort} {row}").choices(range(3, vocab_size), k=length))
        for row, length in enumerate(lengths)
    )
