"""transformers on the same weights: the peer. It also makes the weights, as a model folder.

Its cached forward is timed without the extra work of `generate`, which favours the peer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ferryman.errors import ConfigError
from ferryman_bench.shape import Fields


@dataclass(frozen=True, slots=True)
class Peer:
    """A model of transformers."""

    model: Any
    vocab_size: int

    @property
    def parameters(self) -> int:
        return int(self.model.num_parameters())

    def prefill(self, prompt_len: int) -> Any:
        """Computes a random prompt; returns the cache."""
        prompt = torch.randint(self.vocab_size, (1, prompt_len))
        return self.model(prompt, use_cache=True, logits_to_keep=1).past_key_values

    def decoder(self, requests: int, context_len: int) -> PeerDecoder:
        """A decoder after `context_len` tokens: one prompt, its cache copied for all requests."""
        cache = self.prefill(context_len)
        cache.reorder_cache(torch.zeros(requests, dtype=torch.int64))
        return PeerDecoder(self.model, cache, torch.zeros(requests, 1, dtype=torch.int64))


class PeerDecoder:
    """Each call is one greedy step."""

    def __init__(self, model: Any, cache: Any, token_ids: torch.Tensor) -> None:
        self._model, self._cache, self._token_ids = model, cache, token_ids

    def __call__(self) -> None:
        found = self._model(self._token_ids, past_key_values=self._cache, use_cache=True)
        self._token_ids = found.logits.argmax(-1)


def make_peer(shape: Fields, dtype: str, folder: Path) -> Peer:
    """A model with random weights, saved to `folder`. Raises ConfigError without transformers."""
    try:
        from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig
        from transformers.utils import logging
    except ImportError:
        raise ConfigError(
            "ferryman bench compares with transformers, which is not installed: "
            "pip install transformers (bench core needs none)"
        ) from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = GraniteMoeHybridConfig(**shape)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    model.save_pretrained(folder)
    return Peer(model, config.vocab_size)
