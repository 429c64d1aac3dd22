"""Tiny models in each quantised format, and their twins: the numbers they stand for, in float64.

Codes are drawn at random, and what they stand for is computed by loops over blocks and columns.
Nothing here is shared with what is tested.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LINEAR = re.compile(
    r"(proj|proj_\w+|[qkv]_[ab]_proj\w*|wq_b|wk|(in|out)put_linear|linear_(left|right)"
    r"|per_layer_\w+|altup_\w+\.\d+|modality_router|\w+ion_coefs)\.weight$"
)
"""The weights that tools quantise; the others in a checkpoint stay in floats."""


@dataclass(frozen=True)
class QuantisedWeight:
    """The tensors that replace a weight, by what follows its module's name, and their meaning."""

    stored: Mapping[str, Tensor]
    meaning: Tensor


@dataclass(frozen=True)
class Recipe:
    """A format: its `quantization_config`, and what it makes of a weight [rows, columns].

    A weight with dims that are no multiples of `rows` and `columns` stays in floats.
    """

    config: Mapping[str, Any]
    quantise: Callable[[Tensor], QuantisedWeight]
    rows: int = 1
    columns: int = 1


def save_quantised(plain: Path, folder: Path, recipe: Recipe, seed: int = 0) -> Path:
    """Writes the model in `plain` to `folder`, quantised, and replaces `plain` by its twin."""
    folder.mkdir(parents=True)
    tensors, twin = dict[str, Tensor](), dict[str, Tensor]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, weight in load_file(plain / "model.safetensors").items():
            tensors[name], twin[name] = weight, weight.double()
            if is_quantised(name, weight, recipe):
                found = recipe.quantise(weight)
                del tensors[name]
                module = name.removesuffix("weight")
                tensors |= {f"{module}{suffix}": t for suffix, t in found.stored.items()}
                twin[name] = found.meaning
    assert len(tensors) != len(twin), "nothing was quantised"
    for path in plain.glob("*.json"):
        shutil.copy(path, folder)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    save_file(twin, plain / "model.safetensors", {"format": "pt"})
    raw = json.loads((plain / "config.json").read_text())
    raw["quantization_config"] = recipe.config
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def is_quantised(name: str, weight: Tensor, recipe: Recipe) -> bool:
    # Codes of a single number say nothing about the spread that their scales are drawn from.
    if weight.ndim != 2 or weight.numel() == 1 or not LINEAR.search(name):
        return False
    return weight.shape[0] % recipe.rows == 0 and weight.shape[1] % recipe.columns == 0


def _by_block(weight: Tensor, rows: int, columns: int, scale_name: str) -> QuantisedWeight:
    """FP8 with a scale for each block, and the numbers by a loop over the blocks."""
    counts = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    meaning, scales = torch.empty_like(weight, dtype=torch.float64), torch.empty(counts)
    for i in range(counts[0]):
        for j in range(counts[1]):
            at = (
                slice(i * rows, (i + 1) * rows),
                slice(j * columns, (j + 1) * columns),
            )
            scales[i, j] = weight[at].abs().max() / 448
            codes[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            meaning[at] = codes[at].double() * scales[i, j].double()
    return QuantisedWeight({"weight": codes, scale_name: scales}, meaning)


def fp8_by_block(weight: Tensor, rows: int = 16, columns: int = 24) -> QuantisedWeight:
    return _by_block(weight, rows, columns, "weight_scale_inv")


def fp8_by_tensor(weight: Tensor) -> QuantisedWeight:
    rows, columns = weight.shape
    found = _by_block(weight, rows, columns, "weight_scale")
    scalar = found.stored["weight_scale"].reshape(())
    inputs = {"input_scale": torch.tensor(0.7)}
    return QuantisedWeight({**found.stored, "weight_scale": scalar, **inputs}, found.meaning)


def fp8_by_row(weight: Tensor) -> QuantisedWeight:
    return _by_block(weight, 1, weight.shape[1], "weight_scale")


def _words(unsigned: Tensor, bits: int) -> Tensor:
    """Words of 32 bits from integers along the last axis, the first in the lowest bits."""
    per_word = 32 // bits
    filled = torch.nn.functional.pad(unsigned.long(), (0, -unsigned.shape[-1] % per_word))
    parts = filled.view(*filled.shape[:-1], -1, per_word)
    joined = sum(parts[..., i] << (i * bits) for i in range(per_word))
    assert isinstance(joined, Tensor)
    return torch.where(joined >= 2**31, joined - 2**32, joined).to(torch.int32)


@dataclass(frozen=True)
class _Integers:
    """Unsigned codes [rows, columns], zeros and scales [rows, groups], and the groups."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    groups: Tensor

    @property
    def meaning(self) -> Tensor:
        columns = [
            (self.codes[:, j].double() - self.zeros[:, g].double()) * self.scales[:, g].double()
            for j, g in enumerate(self.groups.tolist())
        ]
        return torch.stack(columns, dim=1)


def _integers(
    weight: Tensor, bits: int, group: int, *, symmetric: bool, in_order: bool = True
) -> _Integers:
    """Random integers about as large as the weight; groups of columns in order or in none."""
    rows, columns = weight.shape
    groups = torch.arange(columns) // group
    if not in_order:
        groups = groups[torch.randperm(columns)]
    num_groups = columns // group
    codes = torch.randint(0, 1 << bits, (rows, columns))
    zeros = torch.full((rows, num_groups), 1 << (bits - 1))
    if not symmetric:
        zeros = torch.randint(1, 1 << bits, (rows, num_groups))
    scales = (torch.rand(rows, num_groups) + 0.5) * weight.std() / (1 << (bits - 1))
    return _Integers(codes, zeros, scales.half(), groups)


def gptq(
    weight: Tensor,
    bits: int,
    *,
    symmetric: bool,
    in_order: bool,
    zero_offset: int = 1,
    group: int = 16,
) -> QuantisedWeight:
    found = _integers(weight, bits, group, symmetric=symmetric, in_order=in_order)
    stored = {
        "qweight": _words(found.codes, bits).T,
        "qzeros": _words(found.zeros.T - zero_offset, bits),
        "scales": found.scales.T,
        "g_idx": found.groups.to(torch.int32),
    }
    return QuantisedWeight(stored, found.meaning)


AWQ_OUTPUTS = [0, 2, 4, 6, 1, 3, 5, 7]
"""The outputs of a word of AWQ, from its lowest bits on."""


def awq(weight: Tensor, group: int = 16) -> QuantisedWeight:
    found = _integers(weight, 4, group, symmetric=False)

    def packed(unsigned: Tensor) -> Tensor:
        return _words(unsigned.reshape(len(unsigned), -1, 8)[..., AWQ_OUTPUTS].flatten(-2), 4)

    stored = {
        "qweight": packed(found.codes.T),
        "qzeros": packed(found.zeros.T),
        "scales": found.scales.T,
    }
    return QuantisedWeight(stored, found.meaning)


def packed_tensors(
    weight: Tensor, bits: int, *, symmetric: bool, in_order: bool
) -> QuantisedWeight:
    found = _integers(weight, bits, 16, symmetric=symmetric, in_order=in_order)
    stored = {
        "weight_packed": _words(found.codes, bits),
        "weight_scale": found.scales.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        stored["weight_zero_point"] = _words(found.zeros.T, bits).T
    if not in_order:
        stored["weight_g_idx"] = found.groups.to(torch.int32)
    return QuantisedWeight(stored, replace(found, scales=found.scales.bfloat16()).meaning)


def int8_tensors(weight: Tensor, *, symmetric: bool) -> QuantisedWeight:
    found = _integers(weight, 8, weight.shape[1], symmetric=symmetric)
    stored = {
        "weight": (found.codes - 128).to(torch.int8),
        "weight_scale": found.scales.bfloat16(),
    }
    if not symmetric:
        stored["weight_zero_point"] = (found.zeros - 128).to(torch.int8)
    return QuantisedWeight(stored, replace(found, scales=found.scales.bfloat16()).meaning)


def fp8_tensors(weight: Tensor) -> QuantisedWeight:
    """A scale for the tensor, as one number in a list."""
    found = fp8_by_tensor(weight)
    scale = found.stored["weight_scale"].reshape(1)
    return QuantisedWeight({**found.stored, "weight_scale": scale}, found.meaning)


def compressed(layout: str, **weights: Any) -> Mapping[str, Any]:
    """A `quantization_config` as llm-compressor writes it."""
    scheme = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*gate$"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }


def gptq_config(bits: int, group: int = 16, **fields: Any) -> Mapping[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, **fields}


def awq_config(group: int = 16) -> Mapping[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": ["gate"],
    }


RECIPES: Mapping[str, Recipe] = {
    "fp8 by block": Recipe(
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [16, 24],
        },
        fp8_by_block,
    ),
    "fp8 by tensor": Recipe(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        fp8_by_tensor,
    ),
    "fbgemm fp8": Recipe({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8_by_row),
    "compressed fp8 by tensor": Recipe(
        compressed("float-quantized", type="float", strategy="tensor"), fp8_tensors
    ),
    "compressed fp8 by row": Recipe(
        compressed("float-quantized", type="float", strategy="channel"), fp8_by_row
    ),
    "compressed fp8 by block": Recipe(
        compressed("float-quantized", type="float", strategy="block", block_structure=[16, 24]),
        lambda weight: _by_block(weight, 16, 24, "weight_scale"),
    ),
    "compressed int8": Recipe(
        compressed("int-quantized", strategy="channel"), partial(int8_tensors, symmetric=True)
    ),
    "compressed int8, zeros": Recipe(
        compressed("int-quantized", strategy="channel", symmetric=False),
        partial(int8_tensors, symmetric=False),
    ),
    "packed int4": Recipe(
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=16),
        partial(packed_tensors, bits=4, symmetric=True, in_order=True),
        columns=16,
    ),
    "packed int4, zeros and order": Recipe(
        compressed(
            "pack-quantized",
            num_bits=4,
            strategy="group",
            group_size=16,
            symmetric=False,
            actorder="group",
        ),
        partial(packed_tensors, bits=4, symmetric=False, in_order=False),
        columns=16,
    ),
    "packed int8": Recipe(
        compressed("pack-quantized", strategy="group", group_size=16),
        partial(packed_tensors, bits=8, symmetric=True, in_order=True),
        columns=16,
    ),
    "gptq int4": Recipe(
        gptq_config(4, sym=True, desc_act=False, checkpoint_format="gptq"),
        partial(gptq, bits=4, symmetric=True, in_order=True),
        rows=8,
        columns=16,
    ),
    "gptq int4, zeros and order": Recipe(
        gptq_config(4, sym=False, desc_act=True),
        partial(gptq, bits=4, symmetric=False, in_order=False),
        rows=8,
        columns=16,
    ),
    "gptq v2 int8": Recipe(
        gptq_config(8, sym=False, desc_act=False, checkpoint_format="gptq_v2"),
        partial(gptq, bits=8, symmetric=False, in_order=True, zero_offset=0),
        rows=8,
        columns=16,
    ),
    "awq": Recipe(awq_config(), awq, rows=8, columns=16),
}
"""Every format that linear layers are stored in, by a name for tests."""


STACKED = re.compile(r"(gate_up_proj|down_proj|up_proj|(in|out)put_linear\.weight)$")
"""The weights of all experts of a layer in one tensor."""

NEVER_INT8 = re.compile(r"(kv_b_proj|weights_proj)\.weight$")
"""Weights that are not multiplied by as they are stored."""


def save_int8_twin(plain: Path, folder: Path, *, transposed: bool = False) -> Path:
    """Writes the numbers to `folder` that int8 weights of the model in `plain` stand for.

    `transposed` says whether stacked experts are stored as [columns, rows].
    """
    folder.mkdir(parents=True)
    tensors = load_file(plain / "model.safetensors")
    for name, weight in tensors.items():
        if weight.ndim == 2 and LINEAR.search(name) and not NEVER_INT8.search(name):
            tensors[name] = _int8_rows(weight)
        if weight.ndim == 3 and STACKED.search(name):
            rows = weight.transpose(1, 2) if transposed else weight
            meaning = torch.stack([_int8_rows(expert) for expert in rows])
            tensors[name] = (meaning.transpose(1, 2) if transposed else meaning).contiguous()
    for path in plain.glob("*.json"):
        shutil.copy(path, folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _int8_rows(weight: Tensor) -> Tensor:
    rows = []
    for row in weight.double():
        scale = row.abs().max() / 127
        rows.append((row / scale).round() * scale)
    return torch.stack(rows)
