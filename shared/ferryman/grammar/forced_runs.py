"""Forced runs: text that a grammar leaves no choice about is proposed as drafts.

The masks allow one token at each place of a forced run, so every such draft is what is drawn: one
step takes the run, instead of a step for each of its tokens. SGLang says jump-forward, guidance
fast-forward. No token is appended unseen: these drafts are verified like any others, so an answer
is the same with and without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ferryman.grammar.compiler import GrammarCompiler
from ferryman.grammar.matcher import GrammarMatcher
from ferryman.schedule.drafting import Drafting, Proposals
from ferryman.schedule.request import Request


@dataclass(frozen=True, slots=True)
class ForcedRunDrafting:
    """`others` propose if nothing is forced, and for requests without a grammar."""

    others: Drafting
    grammars: GrammarCompiler

    @property
    def num_tokens(self) -> int:
        return self.others.num_tokens

    def begin(self, request: Request) -> Proposals:
        proposals, grammar = self.others.begin(request), request.sampling.grammar
        compiled = None if grammar is None else self.grammars.known(grammar)
        if compiled is None:
            return proposals
        first = request.prompt_len - request.num_generated
        return ForcedRuns(compiled.matcher(), request.token_ids[first:].tolist(), proposals)


class ForcedRuns:
    """The forced runs of one request, and other proposals between them."""

    def __init__(
        self, matcher: GrammarMatcher, generated: Sequence[int], others: Proposals
    ) -> None:
        """`generated` are the output tokens of earlier attempts, or from before a retraction."""
        self._matcher, self._generated, self._others = matcher, generated, others

    def propose(self, drawn: Sequence[int], most: int) -> Sequence[int]:
        forced = self._matcher.forced([*self._generated, *drawn]) if most > 0 else ()
        if not forced:
            return self._others.propose(drawn, most)
        # The others learn from each step which of their own drafts were right.
        self._others.propose(drawn, 0)
        return forced[:most]
