"""Counts what one decode step launches on a card, on a machine that has none.

    python -m tools.decode_launches

The layers are those of a published config, and their widths are small: the widths decide no launch
but the sums of parts under bits. A launch is a kernel of Triton, or an operation of torch that
computes or copies on the card, each counted once though torch may launch several for it (a sort
does). Views and new memory are no launches. Experts are in floats (gpt-oss publishes codes, which
launch as many). The step has one request.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from tests.fake_card import CARD, fake_card
from tests.tiny_models import cleared_state, save_random
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ferryman.cache.manifest import Kind
from ferryman.engine.forward.draw_tensors import DrawTensors
from ferryman.engine.forward.token_source import Sampler
from ferryman.model.layers.decoder import Model
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.sampling.inverse_cdf import Filters
from ferryman.model.shapes.batch import DecodeBatch
from ferryman_kernels._triton import Kernel

PUBLISHED = Path(__file__).parents[1] / "tests" / "model" / "published"
VOCAB = 512

_NARROW: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_EXPERTS: Mapping[str, Any] = {
    **_NARROW, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
_GRANITE: Mapping[str, Any] = {
    **_NARROW,
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 40,
    "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    "position_embedding_type": "nope",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "intermediate_size": 64,
    "shared_intermediate_size": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}


def _narrow(file: str, **sizes: Any) -> Mapping[str, Any]:
    """A published config with small widths, in floats."""
    published: dict[str, Any] = json.loads((PUBLISHED / f"{file}.json").read_text())["config"]
    published.pop("quantization_config", None)
    return {**published, **_EXPERTS, **sizes}


def config_of(model: str) -> transformers.PretrainedConfig:
    """The config of a model of `MODELS`."""
    fields = dict(MODELS[model]())
    return transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)


MODELS: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    "Granite 4 H micro": lambda: _GRANITE,
    "Qwen3-Next 80B-A3B": lambda: _narrow(
        "Qwen--Qwen3-Next-80B-A3B-Thinking",
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=16,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        intermediate_size=32,
    ),
    "gpt-oss 20b": lambda: _narrow("openai--gpt-oss-20b", intermediate_size=32),
}


class _CardOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes torch's operations that launch on the card."""

    def __init__(self, names: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        aliases = [returned.alias_info for returned in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name == "to":  # a view only where nothing changes
            is_view = result.dtype == args[0].dtype and result.device == args[0].device
        asks = name.startswith(("empty", "new_empty", "detach", "prim::"))
        if not is_view and not asks and any(tensor.is_cuda for tensor in tensors):
            self._names[name] += 1
        return result


@contextmanager
def counted_launches() -> Iterator[Counter[str]]:
    """The launches inside the block, by the names of kernels and of torch's operations."""
    names = Counter[str]()

    def noted(kernel: Kernel, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **constants: names.update([kernel._function.__name__])

    # The last mode that is entered looks first: at what the caller asks for.
    with patch.object(Kernel, "__getitem__", noted), _CardOperations(names):
        yield names


@dataclass(frozen=True, slots=True)
class StepLaunches:
    """The launches of a decode step's parts: from token ids to logits, and from logits to a token
    that is the likeliest, or drawn with all filters."""

    forward: Counter[str]
    greedy: Counter[str]
    drawn: Counter[str]


def step_launches(model: str, arithmetic: str = "") -> StepLaunches:
    """The launches of a step of one request; `arithmetic` as in LoadOptions, "" for values."""
    with tempfile.TemporaryDirectory() as folder:
        save_random(Path(folder), config_of(model), 3)
        with fake_card(), torch.inference_mode():
            options = LoadOptions("bfloat16", CARD, page_size=16, arithmetic=arithmetic)
            return _of_step(load_model(folder, options))


def _of_step(model: Model) -> StepLaunches:
    slots, state = _whole(1), cleared_state(model, CARD)
    kinds = [kind for kind in model.manifest.kinds if kind is not Kind.RECURRENT]
    tables: dict[Kind, Tensor] = {kind: _whole(1, 4) for kind in kinds}
    batch = DecodeBatch(_whole(1), _whole(1), tables, slots, slots, (1,), _whole(1))
    with counted_launches() as forward:
        logits = model.decode(batch, state)
    return StepLaunches(forward, _of_draw(logits, None), _of_draw(logits, _filters()))


def _of_draw(logits: Tensor, filters: Filters | None) -> Counter[str]:
    draws = DrawTensors(_whole(1), _whole(1), _whole(1), 8, 0, filters)
    history = _whole(1, 8)
    with counted_launches() as names:
        Sampler().tokens(logits, draws, history)
    return names


def _whole(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=CARD)


def _filters() -> Filters:
    real = torch.ones(1, dtype=torch.float64, device=CARD)
    return Filters(_whole(1), real, real, _whole(1), real, real)


def main() -> None:
    for model in MODELS:
        launches = step_launches(model)
        parts = [("forward", launches.forward), ("likeliest token", launches.greedy)]
        for part, names in (*parts, ("drawn token", launches.drawn)):
            print(f"\n{model}, {part}: {names.total()}")
            for name, count in names.most_common():
                print(f"    {count:4} {name}")


if __name__ == "__main__":
    main()
