"""Mistral 4's text: latent attention whose queries grow with their position, experts by a softmax.

Its folders are those of models with images. The text's "model_type" tells it from earlier Mistrals.
"""

from __future__ import annotations

from dataclasses import replace

from ferryman.model.families.deepseek import DeepseekConfig, read_deepseek, with_whole_turns
from ferryman.model.readers.config_readers import read_grouped_routing
from ferryman.model.shapes.attention_shapes import QueryGrowth
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import BEST_OF_GROUP, MoeShape, SoftmaxRouting
from ferryman.model.weights.text_model import text_fields

TEXT_TYPE = "mistral4"
DEFAULTS = {"n_shared_experts": 1, "first_k_dense_replace": 0}
"""The meaning of fields that a config leaves out."""


def read_mistral4(whole: ConfigFields) -> DeepseekConfig:
    """Mistral 4, its text: DeepSeek-V3 with queries that grow, and experts chosen by a softmax."""
    fields = text_fields(whole).with_defaults(**DEFAULTS)
    model = read_deepseek(with_whole_turns(fields), _routing)
    return replace(model, attention=replace(model.attention, growth=_growth(fields)))


def _growth(fields: ConfigFields) -> QueryGrowth | None:
    rope = fields.merged_with("rope_parameters")
    beta = rope.not_negative("llama_4_scaling_beta", 0.0)
    return QueryGrowth(beta, rope.whole("original_max_position_embeddings")) if beta else None


def _routing(fields: ConfigFields, experts: MoeShape) -> SoftmaxRouting:
    groups = read_grouped_routing(fields, experts)
    return SoftmaxRouting(
        groups.norms_shares,
        groups.scaling,
        groups.num_groups,
        groups.groups_per_token,
        BEST_OF_GROUP,
    )
