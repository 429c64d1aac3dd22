"""The shapes of feed-forwards, which keep no state: MLPs, experts, and the routing to experts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MlpShape:
    """A gated MLP. silu of its gate is at most `limit`, and what it lets through within ±`limit`
    (0: there is none; Step 3.7)."""

    inner_dim: int
    has_bias: bool
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Experts, each a gated MLP of `inner_dim`; every token goes to `experts_per_token` of them.
    `limit` as in MlpShape."""

    num_experts: int
    experts_per_token: int
    inner_dim: int
    limit: float = 0.0


BEST_OF_GROUP = 2
"""The number of a group's best experts whose scores rank the group."""


@dataclass(frozen=True, slots=True)
class GroupedRouting:
    """The routing of a token (DeepSeek-V3): to the best `groups_per_token` of `num_groups` groups.

    `norms_shares`: shares are normalised to a sum of 1 before they are multiplied by `scaling`.
    """

    num_groups: int
    groups_per_token: int
    norms_shares: bool
    scaling: float


@dataclass(frozen=True, slots=True)
class SoftmaxRouting:
    """The routing of a token by a softmax over the scores of all experts.

    `shares_sum_to_one`: the shares of the chosen experts are normalised to a sum of 1. Then they
    are multiplied by `scaling`. Experts are chosen from the `groups_per_token` of `num_groups`
    groups whose `best_of_group` best experts have the greatest sums: one in DeepSeek-V2, two in
    Mistral 4.
    """

    shares_sum_to_one: bool
    scaling: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1
    best_of_group: int = 1


@dataclass(frozen=True, slots=True)
class SigmoidRouting:
    """The routing of a token to the experts with the best scores, by their sigmoids (Llama 4),
    whose sum may first be normalised to 1 (Command A with experts)."""

    shares_sum_to_one: bool = False


@dataclass(frozen=True, slots=True)
class BiasedSoftmaxRouting:
    """The routing of a token by a softmax over the scores of all experts, and a bias that affects
    the choice, not the shares (ERNIE 4.5). Shares are divided by their sum, or by `least_sum`."""

    least_sum: float


@dataclass(frozen=True, slots=True)
class IdentityRouting:
    """The routing of a token by a softmax over the scores of all experts and of `num_identities`
    that yield their input, and a bias that affects the choice, not the shares (LongCat-Flash).
    Shares are multiplied by `scaling`."""

    num_identities: int
    scaling: float


@dataclass(frozen=True, slots=True)
class BiasedScoreRouting:
    """The routing of a token to the experts with the best scores plus bias, by the sigmoids of
    their scores without it (Kolibri). `shares_sum_to_one`: these are divided by their sum."""

    shares_sum_to_one: bool


@dataclass(frozen=True, slots=True)
class SoftplusRouting:
    """The routing of a token by √softplus of the scores (DeepSeek-V4): to the experts with the
    greatest ones plus bias, or to those of its id in a table. Shares are those of the chosen
    without the bias, divided by their sum and multiplied by `scaling`."""

    scaling: float


@dataclass(frozen=True, slots=True)
class OneByOneRouting:
    """The routing of a token to two experts, one after the other (Phi-3.5-MoE).

    An expert shares the token with those whose scores are nearer than 2 · `jitter` to its own, by a
    softmax; their shares are lost.
    """

    jitter: float


Routing = (
    SoftmaxRouting
    | GroupedRouting
    | SigmoidRouting
    | BiasedSoftmaxRouting
    | BiasedScoreRouting
    | OneByOneRouting
)


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """Routed experts, and one MLP that every token goes through (None: there is none).

    `gates_shared`: a gate of one number a token multiplies what that MLP yields (Qwen).
    `is_mean`: a layer yields the mean of both, not their sum (Command A with experts).
    """

    experts: MoeShape
    routing: Routing
    shared: MlpShape | None = None
    gates_shared: bool = False
    is_mean: bool = False


FeedForwardShape = MlpShape | MixtureShape
