"""DeepSeek-V2 and V2-Lite: DeepSeek-V3 with experts chosen by a softmax, of the best groups."""

from __future__ import annotations

from ferryman.model.families.deepseek_v3 import DeepseekConfig, load_deepseek, read_deepseek
from ferryman.model.family import Family
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import MoeShape, SoftmaxRouting

METHODS = ("greedy", "group_limited_greedy")


def _read(fields: ConfigFields) -> DeepseekConfig:
    if fields.flag("mlp_bias", False):
        raise fields.refusal("mlp_bias", "false")
    return read_deepseek(fields, _read_routing)


def _read_routing(fields: ConfigFields, experts: MoeShape) -> SoftmaxRouting:
    if fields.raw.get("scoring_func", "softmax") != "softmax":
        raise fields.refusal("scoring_func", "'softmax'")
    if fields.flag("norm_topk_prob", False):
        raise fields.refusal("norm_topk_prob", "false: shares are those of all experts")
    method = fields.raw.get("topk_method") or METHODS[0]
    if method not in METHODS:
        raise fields.refusal("topk_method", f"one of {', '.join(METHODS)}")
    scaling = fields.positive("routed_scaling_factor", 1.0)
    if method == METHODS[0]:
        return SoftmaxRouting(shares_sum_to_one=False, scaling=scaling)
    num_groups = fields.whole("n_group")
    if experts.num_experts % num_groups:
        raise fields.refusal("n_group", f"a divisor of {experts.num_experts} experts")
    chosen = fields.whole("topk_group")
    if chosen > num_groups:
        raise fields.refusal("topk_group", f"at most n_group {num_groups}")
    if experts.experts_per_token > chosen * experts.num_experts // num_groups:
        raise fields.refusal("num_experts_per_tok", "at most the experts of topk_group groups")
    return SoftmaxRouting(False, scaling, num_groups, chosen)


FAMILY = Family(("DeepseekV2ForCausalLM",), _read, load_deepseek)
