"""transformers as a contender.

Its cached forward is timed without the extra work of `generate`, which favours it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ferryman.errors import ConfigError
from ferryman_bench.engine_process import BenchModel
from ferryman_bench.random_model import quiet_transformers
from ferryman_bench.timer import Job


class TransformersContender:
    """A model of transformers, in the dtype of the weights."""

    def __init__(self, model: BenchModel) -> None:
        if model.dtype == "int8":
            raise ConfigError("transformers has no int8 on a processor")
        transformers = quiet_transformers()
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
