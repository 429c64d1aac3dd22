"""A script as a chain of tokens: which token follows which.

A model that only looks at the last token can say a text if no token occurs twice in it. A byte-pair
vocabulary has many tokens for the same characters, so a text can be cut in such a way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Script:
    """A text that follows the control token `cue`."""

    cue: str
    text: str


def successors(
    scripts: Iterable[Script], vocabulary: Mapping[str, int], control: Mapping[str, int], end: int
) -> dict[int, int]:
    """The token behind each token of the scripts; `end` follows the last ones.

    `vocabulary` has the characters of each token of plain text, `control` the ids of the cues.
    Raises ValueError for a text that cannot be cut into tokens that no script uses already.
    """
    follower: dict[int, int] = {}
    for script in scripts:
        tokens = _unused_tokens(script.text, vocabulary, frozenset(follower))
        chain = [control[script.cue], *tokens, end]
        follower |= dict(pairwise(chain))
    return follower


def _unused_tokens(text: str, vocabulary: Mapping[str, int], used: frozenset[int]) -> list[int]:
    """The tokens of a text, each once and none of `used`; long ones are tried first."""
    longest = max(map(len, vocabulary))
    path: list[int] = []

    def extends(start: int) -> bool:
        if start == len(text):
            return True
        for end in range(min(len(text), start + longest), start, -1):
            token = vocabulary.get(text[start:end])
            if token is None or token in used or token in path:
                continue
            path.append(token)
            if extends(end):
                return True
            path.pop()
        return False

    if not extends(0):
        raise ValueError(f"the vocabulary has not enough tokens to say {text!r}")
    return path
