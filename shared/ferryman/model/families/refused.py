"""Architectures that transformers 5.23 has and no family reads, each with the reason.

Most mix tokens in a way for which there is no kernel with one order of sums
(docs/decisions/0165-state-without-a-rule-is-refused-by-name.md). The operations that the others
lack here are in docs/decisions/0197-a-refusal-names-the-operation.md.
"""

from __future__ import annotations

from collections.abc import Mapping

_INKLING2 = (
    "convolutions within its attention have filters that depend on the token; layers also attend "
    "to the sums of blocks of earlier layers"
)
_POOLED_INDEX = (
    "its indexers choose groups of tokens by one key of each group, a mean that weighs each token "
    "by a softmax of each channel, where means here weigh all tokens alike"
)
REFUSED: Mapping[str, str] = {
    "Inkling2ForCausalLM": _INKLING2,
    "Inkling2ForConditionalGeneration": _INKLING2,
    "Glm5NextForConditionalGeneration": _POOLED_INDEX,
    "MistralLarge4ForConditionalGeneration": (
        "layers read the latents of earlier ones, queries and those of indexers grow by learned "
        "numbers of each head, and waves have learned factors; latent attention here has none of it"
    ),
}
