"""A script as a chain of tokens: which token follows which.

A model that only looks at the last token can say its texts if no token occurs twice in them. A
byte-pair vocabulary has many tokens for the same characters, so texts can be cut in such a way for
a while; where one cannot any more, the vocabulary gets another token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise


@dataclass(frozen=True, slots=True)
class Script:
    """A text that follows the control token `cue`."""

    cue: str
    text: str


def pieces_of(scripts: Iterable[Script], vocabulary: Collection[str]) -> dict[str, list[str]]:
    """The texts by their cues, in pieces of which no two are the same.

    Those that `vocabulary` lacks are to be added to it. Raises ValueError for an empty text, and
    for one that cannot be told from another.
    """
    pieces: dict[str, list[str]] = {}
    for script in scripts:
        cut = _cut(script.text, vocabulary, frozenset(chain.from_iterable(pieces.values())))
        if not cut:
            raise ValueError(f"no token is left to say {script.text!r}")
        pieces[script.cue] = cut
    return pieces


def successors(
    pieces: Mapping[str, list[str]], tokens: Mapping[str, int], control: Mapping[str, int], end: int
) -> dict[int, int]:
    """The token behind each token of texts that were cut; `end` follows the last ones.

    `tokens` has the ids of the pieces, `control` those of the cues.
    """
    chains = [[control[cue], *map(tokens.__getitem__, cut), end] for cue, cut in pieces.items()]
    return dict(chain.from_iterable(map(pairwise, chains)))


def _cut(text: str, vocabulary: Collection[str], used: frozenset[str]) -> list[str] | None:
    """The pieces of a text, each once and none of `used`: long ones of the vocabulary are tried
    first, and short ones that it lacks after them. None if each way ends at a used one."""
    if not text:
        return []
    heads = [text[:end] for end in range(len(text), 0, -1) if text[:end] not in used]
    listed = [head for head in heads if head in vocabulary]
    unlisted = [head for head in reversed(heads) if head not in vocabulary]
    for head in listed + unlisted:
        rest = _cut(text[len(head) :], vocabulary, used | {head})
        if rest is not None:
            return [head, *rest]
    return None
