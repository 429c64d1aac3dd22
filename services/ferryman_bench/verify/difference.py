"""The difference of two answers, and the odd one among several.

Answers are compared up to and with the first token that differs: what follows was drawn after other
tokens. The difference is the largest change of a log probability, in nats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from ferryman_bench.endpoint.reply import DrawnToken, Reply

# Rounding moves the logits of unlikely tokens further than those of likely ones.
LEAST_LOGPROB = -5.0
# An answer is odd if it is this many times as far from the others as they are from each other.
ODD_RATIO = 2.0
_LENGTH = "length"


@dataclass(frozen=True, slots=True)
class ReplyDifference:
    """`nats` is 0 for equal bits, and infinite where no rounding explains the difference.

    `position` is the first token that differs; None if all tokens are the same.
    """

    nats: float
    position: int | None = None


def difference_of(first: Reply, second: Reply) -> ReplyDifference:
    """The difference of two answers to one question, the same in both orders."""
    if not first.tokens or not second.tokens:
        return _text_difference(first, second)
    nats = 0.0
    for position, (left, right) in enumerate(zip(first.tokens, second.tokens, strict=False)):
        nats = max(nats, _change(left, right))
        if left.text != right.text:
            return ReplyDifference(nats, position)
    shorter, longer = sorted((first, second), key=lambda reply: len(reply.tokens))
    if len(shorter.tokens) < len(longer.tokens):
        return ReplyDifference(max(nats, _end_change(shorter, longer)), len(shorter.tokens))
    if first.text != second.text:
        return ReplyDifference(math.inf, len(first.tokens))
    return ReplyDifference(nats)


def _text_difference(first: Reply, second: Reply) -> ReplyDifference:
    if first.text == second.text:
        return ReplyDifference(0.0)
    words, others = first.text.split(), second.text.split()
    same = [word == other for word, other in zip(words, others, strict=False)]
    return ReplyDifference(math.inf, same.index(False) if False in same else len(same))


def _change(left: DrawnToken, right: DrawnToken) -> float:
    """The largest change among the likely tokens of one position."""
    if left.text != right.text:
        return max(_missing(left, right), _missing(right, left))
    changes = [abs(left.logprob - right.logprob)]
    for text, logprob in left.alternatives.items():
        if text in right.alternatives and logprob > LEAST_LOGPROB:
            changes.append(abs(logprob - right.alternatives[text]))
    return max(changes)


def _missing(drawn: DrawnToken, other: DrawnToken) -> float:
    """The change of the drawn token's log probability; at least that if the other answer lists only
    likelier ones."""
    if drawn.text in other.alternatives:
        return abs(drawn.logprob - other.alternatives[drawn.text])
    least = min((other.logprob, *other.alternatives.values()))
    return max(0.0, drawn.logprob - least)


def _end_change(shorter: Reply, longer: Reply) -> float:
    """The least change that explains why the shorter answer ended: there the end was the likeliest
    token, so the longer one's next had at most a half. An answer cut at its limit has no such
    end, so a token was lost."""
    if shorter.finish_reason == _LENGTH:
        return math.inf
    return max(0.0, longer.tokens[len(shorter.tokens)].logprob - math.log(0.5))


def spread_of(replies: Sequence[Reply]) -> float:
    """The largest difference between two of `replies`."""
    pairs = combinations(replies, 2)
    return max((difference_of(*pair).nats for pair in pairs), default=0.0)


def odd_index(replies: Sequence[Reply], floor: float) -> int | None:
    """The index of the odd one among three or more, if there is one.

    Its least difference from the others is above `floor` nats, and above twice their spread. If the
    answers are exchangeable, each index is as likely as any other.
    """
    for index, reply in enumerate(replies):
        others = [*replies[:index], *replies[index + 1 :]]
        least = min(difference_of(reply, other).nats for other in others)
        if least > floor and least > ODD_RATIO * spread_of(others):
            return index
    return None
