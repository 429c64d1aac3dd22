"""The tensors of a folder from those of a GGUF file, by the tables of its architecture."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from ferryman.errors import ConfigError
from ferryman.gguf.architectures.row_orders import Order, turned_heads
from ferryman.gguf.architectures.tensor_names import (
    LAYER,
    WAVE_FACTORS,
    NamedTensor,
    TensorForm,
    TensorNames,
    TensorPart,
)
from ferryman.gguf.container import TensorHeader
from ferryman.gguf.model_file import GgufFile

_NORM = re.compile(r"norm(_[a-z]+)?\.weight$")


def named_tensors(model: GgufFile, names: TensorNames) -> dict[str, NamedTensor]:
    """The tensors of the folder by name. Raises ConfigError for a tensor that no table knows."""
    num_layers = model.metadata.num_layers
    unread = {
        name: header
        for name, header in model.tensors.items()
        if name not in WAVE_FACTORS and not _drafts(name, num_layers)
    }
    tensors: list[NamedTensor] = []
    for layer in range(num_layers):
        tensors += _layer_tensors(model, names, layer, unread)
    # Numbers of metadata are tensors of the folder.
    for key, target in names.keys.items():
        tensors += _layer_numbers(model, names, key, target)
    for key, target in names.arrays.items():
        array = model.metadata.stored_wholes(key)
        tensors.append(NamedTensor(target, array.shape, (_whole(array),)))
    for source, target in names.ends.items():
        if (header := unread.pop(source, None)) is None:
            continue
        if "{}" in target:
            tensors += _separate(target, header)
        else:
            form = _form(names, source, target)
            tensors.append(NamedTensor(target, header.shape, (_whole(header),), form))
    if unread:
        raise ConfigError(
            f"{model.metadata.file}: of the architecture {model.metadata.architecture} no tensor "
            f"{', '.join(sorted(unread)[:4])} is known"
        )
    return {tensor.name: tensor for tensor in tensors}


def _drafts(name: str, num_layers: int) -> bool:
    """Whether a tensor is of a layer for multi-token prediction, which stands after the others."""
    layer = name.removeprefix(LAYER).partition(".")[0]
    return name.startswith(LAYER) and layer.isdecimal() and int(layer) >= num_layers


def _layer_tensors(
    model: GgufFile, names: TensorNames, layer: int, unread: dict[str, TensorHeader]
) -> Iterable[NamedTensor]:
    """The tensors of a layer of the folder; takes those that they are made of from `unread`."""
    there, here = f"{LAYER}{layer}.", f"{names.layers}.{layer}."
    for sources, target in names.joined.items():
        if all(there + source in unread for source in sources):
            headers = [unread.pop(there + source) for source in sources]
            yield _joined(names, here, target, headers)
    for pair, target in names.joined_heads.items():
        if all(there + source in unread for source in pair):
            yield _joined_heads(here + target, *(unread.pop(there + source) for source in pair))
    for source, target in {**names.layer, **names.of_layers.get(layer, {})}.items():
        if (header := unread.pop(there + source, None)) is None:
            continue
        if "{}" in target:
            yield from _separate(here + target, header)
            continue
        # Three axes are those of a stack, which the folder has as one tensor, too.
        parts = _members(header) if len(header.shape) == 3 else (_whole(header),)
        yield NamedTensor(
            here + target,
            _shape(names, header, target),
            parts,
            _form(names, source, target),
            _row_order(model, names, layer, source, target, header),
            names.column_orders.get(target),
            num_matrices=len(parts),
        )


def _layer_numbers(
    model: GgufFile, names: TensorNames, key: str, target: str
) -> Iterable[NamedTensor]:
    """A tensor of one number in each layer, from an array of the metadata."""
    header, shape = model.metadata.stored_numbers(key), (1,) if target in names.vectors else ()
    size = header.kind.block_bytes
    for layer in range(model.metadata.num_layers):
        start = header.start + layer * size
        part = TensorPart(f"{key}[{layer}]", header, 1, 1, start, start + size)
        yield NamedTensor(f"{names.layers}.{layer}.{target}", shape, (part,))


def _separate(target: str, header: TensorHeader) -> Iterable[NamedTensor]:
    """The matrices of a stack under names with their numbers."""
    for index, part in enumerate(_members(header)):
        yield NamedTensor(target.format(index), header.shape[1:], (part,))


def _row_order(
    model: GgufFile,
    names: TensorNames,
    layer: int,
    source: str,
    target: str,
    header: TensorHeader,
) -> Order | None:
    if not names.pairs_rows or source.partition(".")[0] not in ("attn_q", "attn_k"):
        return names.row_orders.get(target)
    metadata, rows = model.metadata, header.shape[0]
    key = "{arch}.attention.head_count" + ("" if source.startswith("attn_q") else "_kv")
    heads = metadata.wholes(key)[layer]
    if not heads or rows % (2 * heads):
        raise metadata.refusal(key, f"a divisor of half the {rows} rows of {source}")
    return turned_heads(heads, rows // heads)


def _form(names: TensorNames, source: str, target: str) -> TensorForm:
    if target in names.logs:
        return TensorForm.LOG_NEGATED
    if target in names.exponents:
        return TensorForm.LOG
    is_norm = _NORM.search(source) is not None and target not in names.plain_norms
    return TensorForm.AROUND_ONE if names.norms_around_one and is_norm else TensorForm.PLAIN


def _shape(names: TensorNames, header: TensorHeader, target: str) -> tuple[int, ...]:
    if target in names.vectors:
        return (math.prod(header.shape),)
    if target in names.rows:
        return (1, math.prod(header.shape))
    if target in names.convolutions:
        width = header.shape[-1]
        return (math.prod(header.shape) // width, 1, width)
    return header.shape


def _joined(names: TensorNames, here: str, target: str, headers: list[TensorHeader]) -> NamedTensor:
    """One tensor of the rows of several: of experts, of those of each expert in turn."""
    order, is_transposed = names.joined_orders.get(target), target in names.transposed
    if len(headers[0].shape) == 2 and target not in names.stacked_vectors:
        rows, columns = sum(header.shape[0] for header in headers), headers[0].shape[1]
        return NamedTensor(
            here + target,
            (columns, rows) if is_transposed else (rows, columns),
            tuple(map(_whole, headers)),
            rows=order,
            is_transposed=is_transposed,
        )
    experts, _, *columns_of = headers[0].shape
    sizes = [sum(header.shape[1] for header in headers), *columns_of]
    by_expert = zip(*map(_members, headers), strict=True)
    parts = tuple(part for of_expert in by_expert for part in of_expert)
    return NamedTensor(
        here + target,
        (experts, *(reversed(sizes) if is_transposed else sizes)),
        parts,
        rows=order,
        num_matrices=experts,
        is_transposed=is_transposed,
    )


def _joined_heads(name: str, keys: TensorHeader, values: TensorHeader) -> NamedTensor:
    """Rows of keys, then of values, of each head; those of keys are columns in the file."""
    pairs = zip(_members(keys, is_transposed=True), _members(values), strict=True)
    rows = keys.shape[0] * (keys.shape[2] + values.shape[1])
    parts = tuple(part for pair in pairs for part in pair)
    return NamedTensor(name, (rows, values.shape[2]), parts)


def _whole(header: TensorHeader) -> TensorPart:
    """All rows of a tensor; those of a vector have one column."""
    columns = header.shape[-1] if len(header.shape) > 1 else 1
    rows = math.prod(header.shape) // columns
    return TensorPart(header.name, header, rows, columns, header.start, header.end)


def _members(header: TensorHeader, *, is_transposed: bool = False) -> tuple[TensorPart, ...]:
    """The matrices of a tensor [experts or heads, rows, columns]; with two axes they have one
    column."""
    if len(header.shape) not in (2, 3):
        raise ConfigError(f"{header.file}: tensor {header.name!r} must have 3 axes")
    count, rows, *rest = header.shape
    size = (header.end - header.start) // count
    return tuple(
        TensorPart(
            f"{header.name}[{index}]",
            header,
            rows,
            math.prod(rest),
            header.start + index * size,
            header.start + (index + 1) * size,
            is_transposed,
        )
        for index in range(count)
    )
