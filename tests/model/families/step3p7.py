from __future__ import annotations

import random
from typing import ClassVar

from tests.model.families.shapes import (
    LAYER_TYPES,
    MLP_TYPES,
    grouped_heads,
    nested_rope,
    pattern,
    sizes,
    trunk,
    window_len,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin, PretrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel

LIMITS = [None, 0.0, 0.3, 1.5]


class Step3p7FlashForCausalLM(Step3p7PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The text model alone, which transformers has beside images only."""

    config: Step3p7TextConfig
    config_class = Step3p7TextConfig
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: Step3p7TextConfig) -> None:
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, **options: object) -> CausalLMOutputWithPast:
        hidden = self.model(input_ids=input_ids, **options).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden))


AutoModelForCausalLM.register(Step3p7TextConfig, Step3p7FlashForCausalLM, exist_ok=True)


def step3p7(rng: random.Random) -> PretrainedConfig:
    """Layers in windows have other numbers of heads; activations of some layers are limited."""
    num_layers, heads = rng.randint(1, 5), grouped_heads(rng)
    heads["head_dim"] = rng.choice([4, 8, 16])
    experts = rng.choice([3, 5])
    return Step3p7TextConfig(
        **{**trunk(rng, num_layers), "pad_token_id": 0},
        **heads,
        **sizes(rng),
        num_sliding_attention_heads=heads["num_key_value_heads"] * rng.choice([1, 2, 3]),
        n_routed_experts=experts,
        num_experts_per_tok=rng.randint(1, experts),
        moe_intermediate_size=rng.choice([8, 20]),
        share_expert_dim=rng.choice([8, 20]),
        moe_router_scaling_factor=rng.choice([1.0, 3.0]),
        attention_bias=rng.random() < 0.5,
        query_pre_attn_scalar=rng.choice([None, 7]),
        mlp_layer_types=pattern(rng, num_layers, MLP_TYPES),
        layer_types=pattern(rng, num_layers, LAYER_TYPES),
        sliding_window=window_len(rng),
        swiglu_limits=rng.choice([None, rng.choices(LIMITS, k=num_layers)]),
        swiglu_limits_shared=rng.choice([None, rng.choices(LIMITS, k=num_layers)]),
        rope_parameters={
            word: {**nested_rope(rng), "partial_rotary_factor": rng.choice([0.5, 1.0])}
            for word in LAYER_TYPES
        },
    )
