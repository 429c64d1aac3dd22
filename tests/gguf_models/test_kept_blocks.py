"""Weights in blocks stay in their codes, and the model is the one of the numbers they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.gguf_models.conversion import write_converted
from tests.gguf_models.files import WrittenTensor, floats, write
from tests.gguf_models.test_dequantisation import SCALE_PLACES, random_blocks
from tests.model.paged_run import PagedRun, Part
from tests.tiny_models import save_random
from tools.bench.gguf.container import Setting
from torch import Tensor
from transformers import LlamaConfig

from ferryman.gguf.container import StoredArray
from ferryman.gguf.model_file import read_model
from ferryman.gguf.tensor_types import TENSOR_TYPES
from ferryman.model.footprint import held_bytes, weight_bytes
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.weights import linear, token_table
from ferryman.model.weights.gguf_checkpoint import open_gguf
from ferryman.model.weights.linear import Linear, pack
from ferryman.model.weights.named_weights import FLOATS
from ferryman.model.weights.quantisation.gguf_matrix import FORMS
from ferryman_kernels.products.packed_product import reads_panels

CONFIG: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
PROMPT = [(7 * place * place + 3) % 131 for place in range(40)]
NUMBERS = {kind.name: number for number, kind in TENSOR_TYPES.items()}
with_panels = pytest.mark.skipif(not reads_panels(torch.float32), reason="there is no AVX-512")


def in_blocks(name: str, kind: str, shape: tuple[int, ...], size: float) -> WrittenTensor:
    """Random codes, with scales of that size."""
    block_type = TENSOR_TYPES[NUMBERS[kind]]
    blocks = random_blocks(block_type, int(np.prod(shape)) // block_type.block_len)
    blocks = np.random.default_rng(sum(name.encode())).permutation(blocks)
    for place in SCALE_PLACES[kind]:
        scales = np.ascontiguousarray(blocks[:, place : place + 2]).view("<f2")
        blocks[:, place : place + 2] = (scales * np.float16(size)).view(np.uint8)
    return WrittenTensor(name, NUMBERS[kind], shape, blocks.tobytes())


PLAIN_TYPES = {"F16": "<f2", "BF16": "", "F32": "<f4"}


def written_in(kind: str, name: str, shape: tuple[int, ...], size: float) -> WrittenTensor:
    """Random numbers in a type of floats, random codes in one of blocks."""
    if kind not in PLAIN_TYPES:
        return in_blocks(name, kind, shape, size)
    values = np.random.default_rng(1).normal(0, 0.1, shape).astype("<f4")
    content = values.view("<u4") >> 16 if kind == "BF16" else values.astype(PLAIN_TYPES[kind])
    content = content.astype("<u2") if kind == "BF16" else content
    return WrittenTensor(name, NUMBERS[kind], shape, content.tobytes())


def write_in_blocks(
    folder: Path, kinds: Mapping[str, tuple[str, float]], *, tied: bool = True
) -> Path:
    """A tiny Llama whose matrices have the type that the end of their name has in `kinds`, or that
    of ""."""
    config = LlamaConfig(**CONFIG, tie_word_embeddings=tied)
    save_random(folder / "folder", config, seed=5)
    plain = read_model(write_converted(folder / "folder", folder / "plain.gguf", "llama"))
    written = []
    for name, tensor in plain.tensors.items():
        if len(tensor.shape) == 1:
            written.append(floats(name, plain.floats(name)))
            continue
        kind, size = next(kinds[end] for end in sorted(kinds, reverse=True) if name.endswith(end))
        written.append(written_in(kind, name, tensor.shape, size))
    metadata: dict[str, Setting] = {
        key: value
        for key, value in plain.metadata.values.items()
        if not isinstance(value, StoredArray)
    }
    return write(folder / "tiny.gguf", metadata, written)


def logits(file: Path, dtype: str) -> Tensor:
    """Those of a prompt in two chunks and of three steps behind it."""
    run = PagedRun(load_model(file, LoadOptions(dtype, page_size=16)))
    lane = run.start()
    chunks = [run.prefill([Part(lane, PROMPT[a:b])])[0] for a, b in ((0, 30), (30, 37))]
    return torch.cat([*chunks, *(run.decode([lane], [token]) for token in PROMPT[37:])])


SIZES = {"Q4_1": 0.004, "Q8_0": 0.002, "Q4_K": 2e-4, "Q6_K": 2e-5, "IQ4_XS": 1e-4, "Q3_K": 2e-4}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", SIZES)
def test_logits_are_those_of_the_dequantised_weights(
    kind: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coded = (kind, SIZES[kind])
    kinds = {"": coded, "ffn_down.weight": ("Q8_0", 0.002), "attn_v.weight": ("Q5_0", 0.004)}
    file = write_in_blocks(tmp_path, kinds, tied=tied)
    kept = {dtype: logits(file, dtype) for dtype in ("float32", "bfloat16")}
    exact = logits(file, "float64")
    assert exact.std() > 0.01
    assert (kept["float32"].double() - exact).abs().max() <= 2e-5 * exact.abs().max()
    monkeypatch.setattr(LoadOptions, "format_of", lambda self, folder: FLOATS)
    for dtype, of_dtype in kept.items():
        dense = logits(file, dtype)
        # Codes pass the same product as the numbers they stand for, in the same order of sums.
        assert torch.equal(of_dtype, dense), (dtype, (of_dtype - dense).abs().max())


@with_panels
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", [*FORMS, *PLAIN_TYPES])
def test_weights_hold_at_most_a_tenth_more_than_the_file(
    kind: str, tied: bool, tmp_path: Path
) -> None:
    file = write_in_blocks(tmp_path, {"": (kind, 1.0)}, tied=tied)
    dtype = "float32" if kind == "F32" else "bfloat16"
    options = LoadOptions(dtype, page_size=16)
    held = held_bytes(load_model(file, options), is_on_cpu=True)
    stored = sum(place.num_bytes for place in open_gguf(file).places)
    assert 0.9 * stored < held <= 1.1 * stored
    assert weight_bytes(file, open_gguf(file).tensors, options) == held


@with_panels
@pytest.mark.parametrize("kind", PLAIN_TYPES)
def test_a_tied_head_in_floats_is_one_copy_with_its_embedding(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the table is half of the model."""
    monkeypatch.setitem(CONFIG, "vocab_size", 5120)
    file = write_in_blocks(tmp_path, {"": (kind, 1.0)})
    options = LoadOptions("float32" if kind == "F32" else "bfloat16", page_size=16)
    held = held_bytes(load_model(file, options), is_on_cpu=True)
    stored = sum(place.num_bytes for place in open_gguf(file).places)
    assert 0.9 * stored < held <= 1.1 * stored
    assert weight_bytes(file, open_gguf(file).tensors, options) == held


def test_a_tied_table_is_packed_once_where_no_panels_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the head alone. A table as large as this one has a copy in oneDNN's layout."""
    monkeypatch.setitem(CONFIG, "vocab_size", 5120)
    packed = list[tuple[int, ...]]()

    def counted(weight: Tensor, bias: Tensor | None = None) -> Linear:
        packed.append(tuple(weight.shape))
        return pack(weight, bias)

    for module in (linear, token_table):
        monkeypatch.setattr(module, "reads_panels", lambda dtype: False)
    monkeypatch.setattr(linear, "pack", counted)
    file = write_in_blocks(tmp_path, {"": ("BF16", 1.0)})
    load_model(file, LoadOptions("bfloat16", page_size=16))
    assert packed.count((5120, CONFIG["hidden_size"])) == 1


@with_panels
def test_a_kept_model_is_told_from_a_dequantised_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_in_blocks(tmp_path, {"": ("Q8_0", 0.002)})
    options = LoadOptions("float32", page_size=16)
    kept = load_model(file, options).manifest.fingerprint
    counted = weight_bytes(file, open_gguf(file).tensors, options)
    on_card = LoadOptions("float32", device="cuda", page_size=16)
    assert weight_bytes(file, open_gguf(file).tensors, on_card) > 3 * counted
    monkeypatch.setattr(LoadOptions, "format_of", lambda self, folder: FLOATS)
    assert load_model(file, options).manifest.fingerprint != kept
