"""Outputs of grammars, drawn from masks alone: no model takes part."""

from __future__ import annotations

import random

import numpy as np

from ferryman.grammar.matcher import GrammarMatcher
from ferryman.text.tokenizer import Tokenizer

# More than the tokenizer's 384 tokens: models pad their vocabularies.
NUM_WORDS = 13


def allowed(matcher: GrammarMatcher) -> frozenset[int]:
    """The tokens that may come next; raises where there is none."""
    mask = np.full(NUM_WORDS, 0xFFFFFFFF, np.uint32)
    assert matcher.fill(mask), "a dead end"
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return frozenset(np.flatnonzero(bits).tolist())


def walk(
    matcher: GrammarMatcher, tokenizer: Tokenizer, rng: random.Random, most: int = 4000
) -> list[int]:
    """Tokens up to and without an end token; prefers what closes, so that it comes to an end."""
    token_ids: list[int] = []
    while len(token_ids) < most:
        matcher.move_to(token_ids)
        found = sorted(allowed(matcher))
        if ends := tokenizer.eos_token_ids.intersection(found):
            if len(ends) == len(found) or rng.random() < 0.5:
                return token_ids
            found = [token for token in found if token not in ends]
        closing = [i for i in found if tokenizer.token_bytes(i)[:1] in (b'"', b"}", b"]", b",")]
        token_ids.append(rng.choice(closing if closing and rng.random() < 0.3 else found))
    raise AssertionError(f"no end after {most} tokens: {tokenizer.decode(token_ids)[:200]}")


def may_write(matcher: GrammarMatcher, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the masks let an output be this text, and end after it."""
    token_ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True).tolist()
    for place, token_id in enumerate(token_ids):
        matcher.move_to(token_ids[:place])
        if token_id not in allowed(matcher):
            return False
    matcher.move_to(token_ids)
    return bool(tokenizer.eos_token_ids & allowed(matcher))
