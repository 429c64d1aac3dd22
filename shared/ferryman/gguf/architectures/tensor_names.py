"""Tables from llama.cpp's names of tensors to those of a Hugging Face folder.

A name with "{}" on the folder's side stands for all experts, or for all streams, which the file has
in one tensor. A converter changes the order of some rows and columns, and the numbers of some
tensors; a form undoes the latter:

    PLAIN          the same numbers
    AROUND_ONE     a norm: the file has the weight, the folder its distance from 1
    LOG            the file has exp(A_log), the folder A_log
    LOG_NEGATED    the file has a = -exp(A_log), the folder A_log
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from ferryman.gguf.architectures.row_orders import Order
from ferryman.gguf.container import TensorHeader

LAYER = "blk."
ROPE_FREQS = "rope_freqs.weight"
ROPE_LONG, ROPE_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
WAVE_FACTORS = (ROPE_FREQS, ROPE_LONG, ROPE_SHORT)
"""Tensors that are a part of the config: a factor for each wave of the rotations."""


class TensorForm(Enum):
    """The way from the numbers of the file to those of the folder."""

    PLAIN = "plain"
    AROUND_ONE = "around_one"
    LOG = "log"
    LOG_NEGATED = "log_negated"


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Rows of a tensor in a file: its bytes `[start, end)`, of `rows` rows of `columns` numbers.

    The folder has a transposed part's columns as rows.
    """

    name: str
    header: TensorHeader
    rows: int
    columns: int
    start: int
    end: int
    is_transposed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class NamedTensor:
    """A tensor of the folder: one matrix, or a stack of `num_matrices`, to each of which as many of
    the parts belong. A matrix has the rows of its parts, one part after another.

    `rows` and `columns` are the places in the file's matrix of those of the folder's; None where
    they are in order. With `is_transposed` the folder has the rows of each matrix as columns.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]
    form: TensorForm = TensorForm.PLAIN
    rows: Order | None = None
    columns: Order | None = None
    num_matrices: int = 1
    is_transposed: bool = False

    @property
    def matrices(self) -> tuple[tuple[TensorPart, ...], ...]:
        """The parts of each matrix."""
        size = len(self.parts) // self.num_matrices
        return tuple(self.parts[start : start + size] for start in range(0, len(self.parts), size))


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The tables of an architecture. `ends` are whole names; `layer` are those within a layer,
    after "blk.N." and after the folder's `layers`.

    `joined` has a tensor of the folder by the tensors of the file whose rows it has, and
    `joined_heads` one whose heads have rows of two tensors, of the first by its columns. In the
    folder `vectors` have one axis, `rows` are of one row, `convolutions` have an axis of 1 in the
    middle, and `transposed` ones, which are joined or stacks, have rows as columns; `logs` are the
    logarithms of what the file has, negated, and `exponents` those of what it has.
    `norms_around_one` leaves out `plain_norms`. The orders say what a converter moved;
    `stacked_vectors` are joined of vectors, one of each expert.
    `keys` are arrays of the metadata with a number for each layer, which the folder has as tensors;
    `arrays` are whole ones of whole numbers, by the tensor's whole name.
    `of_layers` has other names for those of some layers, by their numbers.
    """

    ends: Mapping[str, str]
    layer: Mapping[str, str]
    layers: str = "model.layers"
    joined: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    joined_heads: Mapping[tuple[str, str], str] = field(default_factory=dict)
    pairs_rows: bool = False
    norms_around_one: bool = False
    vectors: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    convolutions: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()
    exponents: tuple[str, ...] = ()
    plain_norms: tuple[str, ...] = ()
    row_orders: Mapping[str, Order] = field(default_factory=dict)
    column_orders: Mapping[str, Order] = field(default_factory=dict)
    joined_orders: Mapping[str, Order] = field(default_factory=dict)
    stacked_vectors: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    arrays: Mapping[str, str] = field(default_factory=dict)
    of_layers: Mapping[int, Mapping[str, str]] = field(default_factory=dict)


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
