"""Usage and log probabilities in OpenAI's forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ferryman.handoff.usage import CachedTokens
from ferryman.text.tokenizer import Tokenizer
from ferryman.wire.public import TokenChunk
from ferryman.wire.values import Usage
from ferryman_router.usage import uncached_tokens

Alternatives = list[tuple[int, float]]


def usage_object(request_id: str, usages: Sequence[Usage], page_size: int) -> dict[str, Any]:
    """The sum over all prompts of a call; `ferryman` says which tier, and why not the rest."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    drafted = sum(usage.drafted_tokens for usage in usages)
    accepted = sum(usage.accepted_tokens for usage in usages)
    reasons: dict[str, int] = {}
    tiers = CachedTokens().by_tier
    for usage in usages:
        for tier, tokens in usage.cached.by_tier.items():
            tiers[tier] += tokens
        for reason, tokens in uncached_tokens(usage, page_size).items():
            reasons[reason] = reasons.get(reason, 0) + tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached.total for usage in usages)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "ferryman": {
            "request_id": request_id,
            "cached_tokens": tiers,
            "uncached_reasons": reasons,
        },
    }


def chat_logprobs(
    chunks: Sequence[TokenChunk], tokenizer: Tokenizer, num_shown: int
) -> dict[str, Any]:
    """`choices[].logprobs` of a chat: every token with its alternatives."""
    content = []
    for token_id, logprobs in _tokens(chunks):
        entry = _chat_token(tokenizer, token_id, logprobs.get(token_id, 0.0))
        best = _best(logprobs, num_shown)
        entry["top_logprobs"] = [_chat_token(tokenizer, other, value) for other, value in best]
        content.append(entry)
    return {"content": content}


def completion_logprobs(
    chunks: Sequence[TokenChunk], tokenizer: Tokenizer, num_shown: int, text_offset: int = 0
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion: four lists of the same length."""
    tokens, values, tops, offsets = [], [], [], []
    for token_id, logprobs in _tokens(chunks):
        token = _name(tokenizer, token_id)
        tokens.append(token)
        values.append(logprobs.get(token_id, 0.0))
        best = _best(logprobs, num_shown)
        tops.append({_name(tokenizer, other): value for other, value in best})
        offsets.append(text_offset)
        text_offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _tokens(chunks: Sequence[TokenChunk]) -> list[tuple[int, Mapping[int, float]]]:
    return [
        (token_id, logprobs)
        for chunk in chunks
        for token_id, logprobs in zip(chunk.token_ids, chunk.logprobs, strict=False)
    ]


def _best(logprobs: Mapping[int, float], num_shown: int) -> Alternatives:
    return sorted(logprobs.items(), key=lambda item: (-item[1], item[0]))[:num_shown]


def _name(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}
