"""The oracle: transformers on the same folder, by its uncached full forward.

transformers casts to float32 inside norms, scans and softmaxes. A float64 oracle therefore runs
under a mode that turns every float32 argument into float64 and `Tensor.float` into `Tensor.double`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.choices import Choices
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention


class Float64Mode(TorchFunctionMode):
    """Nothing that runs in here is rounded to float32, nor a quotient of whole numbers."""

    def __enter__(self) -> Float64Mode:
        torch.set_default_dtype(torch.float64)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(torch.float32)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        widened = {name: _widen(value) for name, value in (kwargs or {}).items()}
        return func(*_widen(args), **widened)


def _widen(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    if type(value) in (tuple, list):
        return type(value)(_widen(item) for item in value)
    return value


@dataclass(frozen=True, slots=True)
class OracleAnswer:
    """Logits [tokens, vocab], and how many tokens come before the first unclear choice."""

    logits: Tensor
    num_clear: int

    def shown_to(self, dtype: str) -> Tensor:
        """The logits that a model in `dtype` must give: below float64, only the clear ones."""
        return self.logits if dtype == "float64" else self.logits[: self.num_clear]


@dataclass(frozen=True, slots=True)
class TransformersOracle:
    """A transformers model in one dtype."""

    model: PreTrainedModel
    mode: AbstractContextManager[object]

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits [tokens, vocab] at every position of `token_ids`, in one forward."""
        return self.answer(token_ids).logits

    def answer(self, token_ids: Sequence[int]) -> OracleAnswer:
        """Logits at every position, and where float32 may differ from them."""
        block_len = getattr(self.model.config, "indexer_compress_ratio", 0)
        watching = Choices(len(token_ids), block_len)
        with torch.inference_mode(), self.mode, watching as choices:
            batch = torch.tensor([list(token_ids)])
            logits: Tensor = self.model(batch, use_cache=False).logits[0]
        return OracleAnswer(logits.clone(), choices.num_clear)


def load_oracle(folder: Path, dtype: torch.dtype) -> TransformersOracle:
    """The oracle for the model in `folder`, whose own arithmetic is all in `dtype`."""
    mode = Float64Mode() if dtype is torch.float64 else nullcontext()
    options: Mapping[str, Any] = {
        "attn_implementation": "eager",
        "experts_implementation": "eager",
    }
    with mode:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()
    if dtype is torch.float64:
        _restore_decays(model)
    return TransformersOracle(model, mode)


def _restore_decays(model: PreTrainedModel) -> None:
    """Computes the decays of lightning attention again, which checkpoints keep in float32."""
    for part in model.modules():
        if isinstance(part, MiniMaxLightningAttention):
            numbers = torch.arange(1, part.num_attention_heads + 1, dtype=torch.float64)
            depth = part.layer_idx / (part.num_hidden_layers - 1 + 1e-5)
            rates = 2.0 ** (-8.0 * numbers / part.num_attention_heads) * (1 - depth + 1e-5)
            part.slope_rate = rates[:, None, None]
            decays = part.decay_factors(part.slope_rate)
            part.query_decay, part.key_decay, part.diagonal_decay = decays
