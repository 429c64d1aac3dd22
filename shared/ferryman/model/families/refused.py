"""Architectures that transformers 5.23 has and no family reads, each with the reason.

Most keep state that no resume set has a rule for, or mix tokens in a way for which there is no
kernel with one order of sums (docs/decisions/0165-state-without-a-rule-is-refused-by-name.md).
"""

from __future__ import annotations

from collections.abc import Mapping

_BLOCKS = (
    "keys of several tokens are compressed into one, and a block that is not full yet is state "
    "between two pages, for which no resume set has a rule"
)
_STREAMS = (
    "its residual path is several streams, which each layer mixes by numbers of its own for each "
    "token (hyper-connections), and no layer here does that"
)
_CONVOLVED = (
    "convolutions within its attention keep a recurrent state beside the pages of a layer, which "
    "no attention here has"
)
_BLOCK_SPARSE = "it attends to blocks of keys that an indexer chooses; indexers here choose tokens"
_NARROW_LATENTS = (
    "its latent attention has windows, sizes by layer, and a norm of the rotated key, which latent "
    "attention here does not have"
)

REFUSED: Mapping[str, str] = {
    "DeepseekV4ForCausalLM": _BLOCKS,
    "Qwen4ExpForCausalLM": f"{_BLOCKS}; it also looks up n-grams of the last tokens",
    "Qwen4ExpForConditionalGeneration": f"{_BLOCKS}; it also looks up n-grams of the last tokens",
    "HYV4ForCausalLM": _STREAMS,
    "ZayaForCausalLM": _CONVOLVED,
    "InklingForCausalLM": f"{_CONVOLVED}; scores also depend on distance by learned profiles",
    "InklingForConditionalGeneration": _CONVOLVED,
    "MiniMaxM3SparseForConditionalGeneration": _BLOCK_SPARSE,
    "MiniMaxM3ForCausalLM": _BLOCK_SPARSE,
    "MiniMaxM3VLForCausalLM": _BLOCK_SPARSE,
    "Dots3NoteForCausalLM": _NARROW_LATENTS,
    "Dots3NoteForConditionalGeneration": _NARROW_LATENTS,
    "LongcatFlashForCausalLM": (
        "a layer has two latent attentions, and experts whose output skips the second of them; "
        "some experts are the identity"
    ),
    "xLSTMForCausalLM": (
        "its cells keep a matrix, a norm and a running maximum, and there is no kernel for them"
    ),
}
