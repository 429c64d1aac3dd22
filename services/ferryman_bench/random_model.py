"""Model folders with random weights: all that a measurement needs of a model is its shape.

transformers makes them: it knows the default of each field of `config.json`, the name of each
tensor, and from which distribution its numbers are drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ferryman.errors import ConfigError
from ferryman_bench.shape import VOCAB_SIZE, ModelShape


def make_random_model(shape: ModelShape, dtype: str, folder: Path) -> int:
    """Saves a model of `shape` with random weights; returns the number of its parameters.

    The weights are in `dtype`, in bfloat16 for "int8". Raises ConfigError without transformers.
    """
    transformers = quiet_transformers()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(shape.model_type, **shape.fields)
    stored = torch.bfloat16 if dtype == "int8" else getattr(torch, dtype)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=stored)
    model.save_pretrained(folder)
    return int(model.num_parameters())


def write_tokenizer(folder: Path) -> None:
    """A word for each token id: a router needs a tokenizer, though ids alone are sent."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{index}": index for index in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def quiet_transformers() -> Any:
    """transformers without its warnings and bars. Raises ConfigError if it is not installed."""
    try:
        import transformers
        from transformers.utils import logging
    except ImportError:
        raise ConfigError(
            "benches make random weights with transformers, which is not installed: "
            "pip install 'ferryman[bench]'"
        ) from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return transformers
