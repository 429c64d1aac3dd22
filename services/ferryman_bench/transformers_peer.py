"""transformers as a contender. It also makes the weights of all contenders, as a model folder.

Its cached forward is timed without the extra work of `generate`, which favours it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ferryman.errors import ConfigError
from ferryman_bench.contender import ContenderModel
from ferryman_bench.shape import ModelShape
from ferryman_bench.timer import Job


class TransformersContender:
    """A model of transformers, in the dtype of the weights."""

    def __init__(self, model: ContenderModel) -> None:
        if model.dtype == "int8":
            raise ConfigError("transformers has no int8 on a processor")
        transformers = _transformers()
        dtype = getattr(torch, model.dtype)
        loader = transformers.AutoModelForCausalLM
        self._model = loader.from_pretrained(model.folder, dtype=dtype).eval()
        self._vocab_size = int(self._model.config.vocab_size)

    def logits(self, token_ids: Sequence[int]) -> list[float]:
        found = self._model(torch.tensor([token_ids]), use_cache=False, logits_to_keep=1).logits
        last: list[float] = found[0, -1].to(torch.float32).tolist()
        return last

    def prefill(self, prompt_len: int) -> Job:
        return lambda: self._computed(torch.randint(self._vocab_size, (1, prompt_len)))

    def decoder(self, requests: int, context_len: int, steps: int) -> Job:
        """One prompt, its cache copied for all requests."""
        cache = self._computed(torch.arange(context_len)[None] % self._vocab_size)
        cache.reorder_cache(torch.zeros(requests, dtype=torch.int64))
        return TransformersDecoder(self._model, cache, torch.zeros(requests, 1, dtype=torch.int64))

    def _computed(self, prompt: torch.Tensor) -> Any:
        return self._model(prompt, use_cache=True, logits_to_keep=1).past_key_values


class TransformersDecoder:
    """Each call is one greedy step."""

    def __init__(self, model: Any, cache: Any, token_ids: torch.Tensor) -> None:
        self._model, self._cache, self._token_ids = model, cache, token_ids

    def __call__(self) -> None:
        found = self._model(self._token_ids, past_key_values=self._cache, use_cache=True)
        self._token_ids = found.logits.argmax(-1)


def make_random_model(shape: ModelShape, dtype: str, folder: Path) -> int:
    """Saves a model of `shape` with random weights; returns the number of its parameters.

    The weights are in `dtype`, in bfloat16 for "int8". Raises ConfigError without transformers.
    """
    transformers = _transformers()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(shape.model_type, **shape.fields)
    stored = torch.bfloat16 if dtype == "int8" else getattr(torch, dtype)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=stored)
    model.save_pretrained(folder)
    return int(model.num_parameters())


def _transformers() -> Any:
    try:
        import transformers
        from transformers.utils import logging
    except ImportError:
        raise ConfigError(
            "ferryman bench compares with transformers, which is not installed: "
            "pip install transformers (bench core needs none)"
        ) from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return transformers
