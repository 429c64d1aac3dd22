"""Tables from llama.cpp's names of tensors to those of a Hugging Face folder.

A name with "{}" on the folder's side stands for all experts, which the file has in one tensor. A
converter changes the numbers of some tensors; a form undoes that:

    PLAIN          the same numbers
    PAIRED         rows of q or k, which ggml's plain rope wants in neighbouring pairs
    AROUND_ONE     a norm: the file has the weight, the folder its distance from 1
    LOG_NEGATED    the file has a = -exp(A_log), the folder A_log
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from ferryman.errors import ConfigError
from ferryman.gguf.container import TensorHeader
from ferryman.gguf.model_file import GgufFile

LAYER = "blk."
ROPE_FREQS = "rope_freqs.weight"


class TensorForm(Enum):
    """The way from the numbers of the file to those of the folder."""

    PLAIN = "plain"
    PAIRED = "paired"
    AROUND_ONE = "around_one"
    LOG_NEGATED = "log_negated"


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Rows of a tensor in a file: its bytes `[start, end)`, of `rows` rows of `columns` numbers."""

    name: str
    header: TensorHeader
    rows: int
    columns: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor of the folder: the rows of its parts, one part after another, in `form`.

    Of a PAIRED one `heads` is the number of heads, and `turning` that of the channels of each head
    that turn.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]
    form: TensorForm = TensorForm.PLAIN
    heads: int = 0
    turning: int = 0


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The tables of an architecture. `ends` are whole names; `layer` are those within a layer,
    after "blk.N." and after the folder's `layers`.

    `joined` has a tensor of the folder by the tensors of the file whose rows it has. In the folder
    `vectors` have one axis, `rows` are of one row, and `convolutions` have an axis of 1 in the
    middle; `logs` are the logarithms of what the file has, negated.
    """

    ends: Mapping[str, str]
    layer: Mapping[str, str]
    layers: str = "model.layers"
    joined: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    pairs_rows: bool = False
    norms_around_one: bool = False
    vectors: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    convolutions: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()


ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PROJECTIONS = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
ATTENTION = {
    **{
        f"{there}.{part}": f"self_attn.{here}.{part}"
        for there, here in _PROJECTIONS.items()
        for part in ("weight", "bias")
    },
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
NORMS = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
SHARED = {"ffn_gate_shexp": "gate", "ffn_up_shexp": "up", "ffn_down_shexp": "down"}


def mlp_names(under: str = "mlp.") -> dict[str, str]:
    """A gated MLP."""
    return {
        f"ffn_{part}.{kind}": f"{under}{part}_proj.{kind}"
        for part in ("gate", "up", "down")
        for kind in ("weight", "bias")
    }


def expert_names(shared: str = "") -> dict[str, str]:
    """Experts and their router by the names of Qwen, with an MLP `shared` beside them."""
    names = {
        f"ffn_{part}_exps.weight": f"mlp.experts.{{}}.{part}_proj.weight"
        for part in ("gate", "up", "down")
    }
    beside = {
        f"{there}.weight": f"mlp.{shared}.{here}_proj.weight" for there, here in SHARED.items()
    }
    return {"ffn_gate_inp.weight": "mlp.gate.weight", **names, **(beside if shared else {})}


def named_tensors(model: GgufFile, names: TensorNames) -> dict[str, NamedTensor]:
    """The tensors of the folder by name. Raises ConfigError for a tensor that no table knows."""
    tensors: dict[str, NamedTensor] = {}
    unread = {name: header for name, header in model.tensors.items() if name != ROPE_FREQS}
    for layer in range(model.metadata.whole("{arch}.block_count")):
        there, here = f"{LAYER}{layer}.", f"{names.layers}.{layer}."
        for sources, target in names.joined.items():
            if all(there + source in unread for source in sources):
                headers = [unread.pop(there + source) for source in sources]
                tensors[here + target] = _joined(here + target, headers)
        for source, target in names.layer.items():
            if (header := unread.pop(there + source, None)) is not None:
                for tensor in _of_layer(model, names, header, source, target):
                    tensors[here + tensor.name] = tensor
    for source, target in names.ends.items():
        if (header := unread.pop(source, None)) is not None:
            form = _form(names, source, target)
            tensors[target] = NamedTensor(target, header.shape, (_whole(header),), form)
    if unread:
        raise ConfigError(
            f"{model.metadata.file}: of the architecture {model.metadata.architecture} no tensor "
            f"{', '.join(sorted(unread)[:4])} is known"
        )
    return tensors


def _of_layer(
    model: GgufFile, names: TensorNames, header: TensorHeader, source: str, target: str
) -> list[NamedTensor]:
    if "{}" in target:
        return [
            NamedTensor(target.format(index), header.shape[1:], (part,))
            for index, part in enumerate(_experts(header))
        ]
    form = _form(names, source, target)
    tensor = NamedTensor(target, _shape(names, header, target), (_whole(header),), form)
    if form is not TensorForm.PAIRED:
        return [tensor]
    return [_paired(model, tensor, source)]


def _paired(model: GgufFile, tensor: NamedTensor, source: str) -> NamedTensor:
    metadata = model.metadata
    layer = int(tensor.parts[0].name.split(".")[1])
    key = "{arch}.attention.head_count" + ("" if source.startswith("attn_q") else "_kv")
    heads = metadata.wholes(key)[layer]
    if not heads or tensor.shape[0] % heads:
        raise metadata.refusal(key, f"a divisor of the {tensor.shape[0]} rows of {source}")
    turning = metadata.whole("{arch}.rope.dimension_count", tensor.shape[0] // heads)
    return NamedTensor(tensor.name, tensor.shape, tensor.parts, tensor.form, heads, turning)


def _form(names: TensorNames, source: str, target: str) -> TensorForm:
    if target in names.logs:
        return TensorForm.LOG_NEGATED
    if names.norms_around_one and source.endswith("norm.weight"):
        return TensorForm.AROUND_ONE
    if names.pairs_rows and source.partition(".")[0] in ("attn_q", "attn_k"):
        return TensorForm.PAIRED
    return TensorForm.PLAIN


def _shape(names: TensorNames, header: TensorHeader, target: str) -> tuple[int, ...]:
    if target in names.vectors:
        return (math.prod(header.shape),)
    if target in names.rows:
        return (1, math.prod(header.shape))
    if target in names.convolutions:
        return (header.shape[0], 1, *header.shape[1:])
    return header.shape


def _joined(name: str, headers: list[TensorHeader]) -> NamedTensor:
    """One tensor of the rows of several: of experts, of those of each expert in turn."""
    *stacked, rows, columns = headers[0].shape
    if stacked:
        parts = tuple(
            part for of_expert in zip(*map(_experts, headers), strict=True) for part in of_expert
        )
        return NamedTensor(name, (*stacked, rows * len(headers), columns), parts)
    return NamedTensor(name, (rows * len(headers), columns), tuple(map(_whole, headers)))


def _whole(header: TensorHeader) -> TensorPart:
    """All rows of a tensor; a vector is one row."""
    columns = header.shape[-1]
    rows = math.prod(header.shape[:-1])
    return TensorPart(header.name, header, rows, columns, header.start, header.end)


def _experts(header: TensorHeader) -> tuple[TensorPart, ...]:
    """The rows of each expert of a tensor [experts, rows, columns]."""
    if len(header.shape) != 3:
        raise ConfigError(f"{header.file}: tensor {header.name!r} must have 3 axes")
    experts, rows, columns = header.shape
    size = (header.end - header.start) // experts
    return tuple(
        TensorPart(
            f"{header.name}[{index}]",
            header,
            rows,
            columns,
            header.start + index * size,
            header.start + (index + 1) * size,
        )
        for index in range(experts)
    )
