"""A model's folder and its GGUF file, compared: what is read, logits, and weights that stay in
blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.gguf_models.files import WrittenTensor, q8_0, write
from tests.model.paged_run import PagedRun, Part
from tools.bench.gguf.container import Setting
from torch import Tensor

from ferryman.gguf.architectures import ARCHITECTURES
from ferryman.gguf.model_file import read_model
from ferryman.model.config import load_config
from ferryman.model.footprint import held_bytes, weight_bytes
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.shapes.config_fields import read_fields
from ferryman.model.weights.gguf_checkpoint import open_gguf
from ferryman.model.weights.named_weights import FLOATS
from ferryman_kernels.products.packed_product import reads_panels

Logits = Callable[[Path, str], Tensor]
"""Those of the model at a path, in a dtype."""
with_panels = pytest.mark.skipif(not reads_panels(torch.float32), reason="there is no AVX-512")


def prompt_of(length: int) -> list[int]:
    return [(7 * place * place + 3) % 131 for place in range(length)]


def logits_of(model: Path, dtype: str, prompt: Sequence[int], cuts: tuple[int, int]) -> Tensor:
    """Those of a prompt in two chunks, up to each of `cuts`, and of the steps behind it."""
    run = PagedRun(load_model(model, LoadOptions(dtype, page_size=16)))
    lane, (cut, end) = run.start(), cuts
    chunks = [run.prefill([Part(lane, prompt[a:b])])[0] for a, b in ((0, cut), (cut, end))]
    return torch.cat([*chunks, *(run.decode([lane], [token]) for token in prompt[end:])])


def assert_trunk_is_the_folders(folder: Path, file: Path) -> None:
    expected: Any = load_config(folder)
    actual: Any = load_config(file)
    assert actual.trunk == replace(expected.trunk, eos_token_ids=(2,))


def assert_logits_are_the_folders(
    folder: Path, file: Path, logits: Logits, tolerance: float
) -> None:
    """Within this share of the largest one, by a name of the folder's architecture."""
    named = read_fields(file / "config.json").words("architectures")
    assert set(named) <= set(ARCHITECTURES[read_model(file).metadata.architecture].folders)
    exact = logits(folder, "float64")
    assert exact.std() > 0.01
    difference = (logits(file, "float64") - exact).abs().max()
    assert difference <= tolerance * exact.abs().max(), difference


def in_blocks(tensor: WrittenTensor) -> WrittenTensor:
    """A weight in Q8_0, if it is one that a converter quantises."""
    values = np.frombuffer(tensor.content, "<f4").reshape(tensor.shape)
    is_plain = any(part in tensor.name for part in ("norm", "conv", "gate_inp", "ssm_a", "ssm_d"))
    if len(tensor.shape) < 2 or is_plain or tensor.name.endswith("bias") or tensor.shape[-1] % 32:
        return tensor
    return q8_0(tensor.name, values)


def assert_blocks_stay(
    file: Path,
    parts: tuple[Mapping[str, Setting], Sequence[WrittenTensor]],
    logits: Logits,
    share: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Writes the file's keys and tensors, weights in blocks. They hold less than `share` of the
    dequantised ones, and have their logits."""
    metadata, tensors = parts
    write(file, dict(metadata), [in_blocks(tensor) for tensor in tensors])
    options = LoadOptions("float32", page_size=16)
    held = held_bytes(load_model(file, options), is_on_cpu=True)
    assert weight_bytes(file, open_gguf(file).tensors, options) == held
    kept = logits(file, "float32")
    monkeypatch.setattr(LoadOptions, "format_of", lambda self, folder: FLOATS)
    assert held < share * held_bytes(load_model(file, options), is_on_cpu=True)
    difference = (kept - logits(file, "float32")).abs().max()
    # Experts one by one add up in another order than in one product.
    assert difference <= 1e-4 * kept.abs().max(), difference
