"""The shapes of attention: what a layer computes, and what it keeps of each token in pages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from ferryman.cache.manifest import Kind, SectionSpec
from ferryman.model.shapes.model_shapes import FP8, StatePlace
from ferryman.model.shapes.ranks import per_rank, per_rank_replicated
from ferryman.model.shapes.rotary import NoScaling, Stretch


@dataclass(frozen=True, slots=True)
class NoPositions:
    """Attention without positions ("nope"): the recurrent layers provide the order."""


@dataclass(frozen=True, slots=True)
class RotaryPositions:
    """Rotary positions over the first `rotary_dim` of each head.

    `is_interleaved`: neighbouring channels are rotated together, not channels half of `rotary_dim`
    apart.
    """

    theta: float
    rotary_dim: int
    scaling: Stretch = field(default_factory=NoScaling)
    is_interleaved: bool = False


class HeadNorm(StrEnum):
    """The norms of q and k between their projection and their pages."""

    NONE = "none"
    EACH_HEAD = "each head, then the rotation"
    ROTATED_HEAD = "the rotation, then each head"
    ALL_HEADS = "all heads as one row, then the rotation"
    OWN_CENTRED = "each head by a norm of its own around the mean, then the rotation"
    ROTATED_WITHOUT_WEIGHTS = "the rotation, then each head, by a norm whose weights are one"


class ValueSource(StrEnum):
    """The origin of values: a projection of their own, which may be normed, or that of keys."""

    PROJECTED = "v_proj"
    NORMED = "v_proj, then a norm of each head without weights"
    NORMED_KEYS = "k_proj, then a norm of each head without weights"


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries grow with their position: by 1 + beta · log(1 + ⌊(position + first) / length⌋).

    Scores then keep their spread over contexts longer than those of training. Ministral 3 counts
    positions from `first` = 0, Llama 4 from 1.
    """

    beta: float
    length: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class LogGrowth:
    """Queries grow with their position: by 1 + alpha · log((position + 1) / floor), from position
    `floor` on (Inkling)."""

    alpha: float
    floor: int


@dataclass(frozen=True, slots=True)
class DistanceShape:
    """A term of distance in each score (Inkling): a query head's state of `state_dim` numbers mixes
    learned profiles, which have a number for each distance below `extent`."""

    state_dim: int
    extent: int
    growth: LogGrowth | None


class GateActivation(StrEnum):
    """The activation of a gate."""

    SIGMOID = "sigmoid"
    SOFTPLUS = "softplus"


@dataclass(frozen=True, slots=True)
class GateShape:
    """A gate on the heads' outputs by a product of its own, whose weight is called `name`.

    `is_by_head`: it yields one number a head, not one a channel.
    """

    name: str
    activation: GateActivation
    is_by_head: bool = False


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Grouped-query attention; query head h reads key head h // (q_heads / kv_heads).

    A query sees the last `window_len` positions, its own included; 0: all of them. With a
    `chunk_len` it sees those of its own chunk alone, and chunks are counted from position 0
    (Llama 4); a page lies within one chunk. `has_bias` is about q, k and v, `has_out_bias` about
    the product that joins the heads. `has_sinks`: each query head has one more score, without a
    value. `gates_output`: each head of q is followed by a head that gates its output. Scores are
    capped at `score_cap` by a tanh (0: they are not). `values` is their origin (Gemma 4). Numbers
    of q, k and v are cut at -`clip` and `clip` before the rotation (0: they are not; OLMo 1).
    `gate` is a gate whose product stands apart from that of q. With a `value_dim` below `head_dim`
    values are that narrow (0: as wide as keys); pages hold them with zeros behind. Values are
    multiplied by `value_scale` (both MiMo-V2).
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    has_bias: bool
    positions: RotaryPositions | NoPositions
    window_len: int = 0
    head_norm: HeadNorm = HeadNorm.NONE
    has_sinks: bool = False
    gates_output: bool = False
    has_out_bias: bool = False
    score_cap: float = 0.0
    growth: QueryGrowth | None = None
    chunk_len: int = 0
    values: ValueSource = ValueSource.PROJECTED
    clip: float = 0.0
    gate: GateShape | None = None
    value_dim: int = 0
    value_scale: float = 1.0

    @property
    def value_head_dim(self) -> int:
        """The channels of a head's value and output."""
        return self.value_dim or self.head_dim

    @property
    def projected_heads(self) -> int:
        """Heads that q_proj yields."""
        return self.q_heads * (2 if self.gates_output else 1)

    @property
    def reach(self) -> int:
        """The last positions that hold all a query sees, its own included; 0: all of them.

        A window as long as a chunk holds the chunk so far, for a query at any place in it.
        """
        return self.window_len or self.chunk_len

    @property
    def kind(self) -> Kind:
        return Kind.WINDOW if self.reach else Kind.FULL

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        shape, names = (self.kv_heads, place.page_size, self.head_dim), ("key", "value")
        if place.kv_dtype != FP8:
            return tuple(
                SectionSpec(name, place.layer, shape, place.dtype, shard_axis=0) for name in names
            )
        codes = [SectionSpec(n, place.layer, shape, "float8_e4m3fn", shard_axis=0) for n in names]
        scales = [
            SectionSpec(f"{name}_scale", place.layer, shape[:2], "float32", shard_axis=0)
            for name in names
        ]
        return (*codes, *scales)

    def shard(self, num_ranks: int) -> AttentionShape:
        return replace(
            self,
            q_heads=per_rank("q_heads", self.q_heads, num_ranks),
            kv_heads=per_rank_replicated("kv_heads", self.kv_heads, num_ranks),
        )


LATENT_NORM_EPS = 1e-6
"""The epsilon of norms on latents, for most families independent of a model's other norms."""


@dataclass(frozen=True, slots=True)
class ExpertHeadsShape(AttentionShape):
    """Attention whose queries and outputs are made by the experts of `num_experts` that a router
    chooses for a token (JetMoe). Each of them yields one query head for each key head."""

    num_experts: int = 1

    @property
    def experts_per_token(self) -> int:
        return self.q_heads // self.kv_heads

    def shard(self, num_ranks: int) -> ExpertHeadsShape:
        """A share of the key heads, with all experts' queries that read them."""
        kv_heads = per_rank("num_key_value_heads", self.kv_heads, num_ranks)
        return replace(self, q_heads=kv_heads * self.experts_per_token, kv_heads=kv_heads)


def row_of_token(name: str, dim: int, place: StatePlace) -> tuple[SectionSpec, ...]:
    """A page's section `name`, a row of `dim` channels a token. Every rank keeps all of it, because
    all heads read it."""
    shape = (place.page_size, dim)
    return (SectionSpec(name, place.layer, shape, place.dtype, shard_axis=None),)


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Multi-head latent attention (DeepSeek-V2): a token keeps one row, which all heads read.

    A head's query and key have `plain_dim` channels without positions and `rope_dim` that are
    rotated; its value has `value_dim`. Plain keys and values are computed from the row's
    `latent_dim` channels, queries from a latent of `query_rank` channels (0: directly from hidden).
    `is_interleaved`: neighbouring channels are rotated together, not channels half of `rope_dim`
    apart. `gate` multiplies the heads' outputs (Ling 3, HY V4). `growth` is that of queries, or
    None (Mistral 4). `has_sinks` as in AttentionShape (HY V4). A query sees the last `window_len`
    positions, its own included; 0: all of them. `norms_rope`: the rotating part of a row has a norm
    before it turns. Normed latents of queries and of rows are multiplied by `query_scale` and
    `latent_scale`. All these norms have `norm_eps` (dots3 note).
    """

    q_heads: int
    query_rank: int
    latent_dim: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    has_bias: bool
    positions: RotaryPositions | NoPositions
    is_interleaved: bool
    gate: GateShape | None = None
    growth: QueryGrowth | None = None
    has_sinks: bool = False
    window_len: int = 0
    norms_rope: bool = False
    query_scale: float = 1.0
    latent_scale: float = 1.0
    norm_eps: float = LATENT_NORM_EPS

    @property
    def row_dim(self) -> int:
        return self.latent_dim + self.rope_dim

    @property
    def reach(self) -> int:
        """The last positions that hold all a query sees, its own included; 0: all of them."""
        return self.window_len

    @property
    def kind(self) -> Kind:
        return Kind.WINDOW if self.window_len else Kind.FULL

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        return row_of_token("latent", self.row_dim, place)

    def shard(self, num_ranks: int) -> LatentShape:
        """A share of the heads; every rank keeps all rows, because all heads read them."""
        return replace(self, q_heads=per_rank("q_heads", self.q_heads, num_ranks))


@dataclass(frozen=True, slots=True)
class IndexShape:
    """The lightning indexer of sparse attention (DeepSeek-V3.2), which chooses the positions to
    attend to.

    `heads` queries choose `count` positions. The first of their `head_dim` channels are rotated, or
    the last (`turns_last`, HY V4), as many as in the attention; `is_interleaved` as in
    RotaryPositions. `norm_eps` is that of the keys' norm.
    """

    heads: int
    head_dim: int
    count: int
    is_interleaved: bool = False
    turns_last: bool = False
    norm_eps: float = 1e-6

    @property
    def kind(self) -> Kind:
        return Kind.FULL

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        return row_of_token("index", self.head_dim, place)


@dataclass(frozen=True, slots=True)
class BlockIndexShape:
    """The indexer of block-sparse attention (MiniMax M3), which chooses the blocks of keys that a
    token attends to, for each head of keys.

    `heads` queries, one for each head of keys, choose `count` blocks of `block_len` positions; the
    last `num_local` up to the token's own are always among them. As many of the `head_dim` channels
    turn as in the attention.
    """

    heads: int
    head_dim: int
    block_len: int
    count: int
    num_local: int

    @property
    def kind(self) -> Kind:
        return Kind.FULL

    def sections(self, place: StatePlace) -> tuple[SectionSpec, ...]:
        return row_of_token("index", self.head_dim, place)

    def shard(self, num_ranks: int) -> BlockIndexShape:
        """The heads of a rank's keys; every rank keeps all index keys, because all heads read
        them."""
        return replace(self, heads=per_rank_replicated("heads", self.heads, num_ranks))
