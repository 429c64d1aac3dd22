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
from tools.bits.served_forms import FORMS, ServedForm
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
SERVED_FORMS = (
    "gemma3:fp8",
    "gemma3:fp8-tensor",
    "gemma3:gptq",
    "gemma3:gptq-order",
    "gemma3:gptq-int8",
    "gemma3:awq",
    "gemma3:packed-int4",
    "gemma3:packed-int8",
    "gemma3:stored-int8",
    "gemma3:int8-zeros",
    "llama:fp8",
    "bamba:awq",
    "granite_moe_rope:gptq",
    "falcon_h1:packed-int8",
    "nemotron_h:fp8",
    "qwen3_next:fp8",
    "kimi_linear:fp8",
    "deepseek_v3:fp8",
    "deepseek_v32:fp8",
    "gpt_oss:mxfp4",
    "gemma3:fp8-pages",
    "qwen3_next:fp8-pages",
    "gpt_oss:fp8-pages",
    "falcon_h1:fp8-pages",
    "gemma4:fp8-pages",
    "llama:adapter",
    "granite_moe_rope:adapter",
    "olmo_hybrid:adapter",
)
"""Weights and pages in codes, and adapters: every form, and hybrids in some."""
GROUPS = {
    "families": TINY,
    "all": tuple(BY_NAME),
    "forms": SERVED_FORMS,
    "wide": tuple(WIDE),
    "smollm2": ("smollm2",),
}
"""Names that stand for several models."""

_PROMPT_LENS = (75, 98, 61, 110, 87, 77)
_TURN_LENS = (19, 11)


@dataclass(frozen=True, slots=True)
class BitsModel:
    """A model as it is served, and its prompts. `turns` follow the answers, one after the other;
    `has_own_layer` if it can draft with a layer of its own."""

    name: str
    served: ServedForm
    prompts: tuple[Prompt, ...]
    turns: tuple[Prompt, ...]
    has_own_layer: bool

    @property
    def folder(self) -> Path:
        return self.served.folder


def named(names: str) -> list[str]:
    """The models that a list with commas means. Raises ValueError for an unknown name."""
    chosen: list[str] = []
    for name in names.split(","):
        chosen += GROUPS.get(name, (name,))
    known = {*BY_NAME, *VARIANTS, *WITH_WINDOWS, *WIDE, *GROUPS}
    if unknown := [name for name in chosen if _plain_name(name) not in known]:
        raise ValueError(f"no model {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    if unknown := [name for name in chosen if _form_name(name) not in FORMS]:
        forms = ", ".join(filter(None, FORMS))
        raise ValueError(f"no form as in {', '.join(unknown)}; behind a colon there are {forms}")
    return list(dict.fromkeys(chosen))


def _plain_name(name: str) -> str:
    return name.partition(":")[0]


def _form_name(name: str) -> str:
    return name.partition(":")[2]


@contextmanager
def saved_model(name: str, num_prompts: int) -> Iterator[BitsModel]:
    """The model called `name` in a folder, for the length of a `with`."""
    plain, form = _plain_name(name), _form_name(name)
    with tempfile.TemporaryDirectory(prefix="ferryman-bits-") as scratch:
        if plain == "smollm2":
            folder = smollm2.made_folder()
            prompts, turns = smollm2.chats(folder, num_prompts, NUM_TURNS)
        else:
            folder = _saved(Path(scratch) / "plain", plain)
            vocab_size = load_config(folder).trunk.vocab_size
            lengths = [_PROMPT_LENS[row % len(_PROMPT_LENS)] for row in range(num_prompts)]
            prompts = random_prompts("prompt", lengths, vocab_size)
            turns = random_prompts("turn", _TURN_LENS, vocab_size)
        served = FORMS[form](folder, Path(scratch) / "served")
        yield BitsModel(name, served, prompts, turns, has_own_layer=plain in WITH_OWN_LAYER)


def _saved(folder: Path, name: str) -> Path:
    if name in WIDE:
        return save_random(folder, WIDE[name](), seed=0)
    if name in WITH_OWN_LAYER:
        return save_with_mtp(folder, name, is_wanted=has_all_parts)
    if name == NATIVE or name in VARIANTS or name in WITH_WINDOWS:
        return save_variant(folder, name)
    seed = next(seed for seed in count() if has_all_parts(random_config(name, seed)))
    return save_random(folder, random_config(name, seed), seed)


def has_all_parts(config: PretrainedConfig) -> bool:
    """Whether a random config has every kind of layer, and layers after those that mix positions:
    keys of a first layer do not depend on attention."""
    words = getattr(config, "layers_block_type", None) or ["any"] * config.num_hidden_layers
    num_dense = getattr(config, "first_k_dense_replace", 0)
    has_layers = len(words) >= max(3, len(set(words))) and num_dense < len(words)
    return has_layers and _chooses_a_part(config)


def _chooses_a_part(config: PretrainedConfig) -> bool:
    """False for an index that chooses all of a prompt, and for a model that looks up n-grams in no
    layer though others of its family do."""
    if not getattr(config, "ple_layer_ids", True):
        return False
    chosen = max(getattr(config, name, 0) for name in ("index_topk", "indexer_budget"))
    blocks = getattr(config, "index_topk_blocks", 0) * getattr(config, "index_block_size", 0)
    return max(chosen, blocks) < min(_PROMPT_LENS)


def random_prompts(sort: str, lengths: Sequence[int], vocab_size: int) -> tuple[Prompt, ...]:
    """A prompt of each length. Control tokens, which come first, are not among their tokens."""
    return tuple(
        tuple(random.Random(f"{sort} {row}").choices(range(3, vocab_size), k=length))
        for row, length in enumerate(lengths)
    )
