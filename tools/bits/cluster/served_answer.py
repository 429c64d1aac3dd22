"""An answer as a client sees it, and the cold run that it is compared with.

A client sees log probabilities: of the token that was drawn and of the likeliest ones, as many as
may be asked for. They travel as they are, in float64.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from tests.harness.cluster import Generated
from tools.bits.compared_answer import ComparedAnswer, NotTried
from tools.bits.models import Prompt

from ferryman.cache.manifest import Exactness
from ferryman.llm import LLM
from ferryman.schedule.request import MAX_LOGPROBS, SamplingParams


@dataclass(frozen=True, slots=True)
class ServedAnswer(ComparedAnswer):
    """Digests are the bits of the log probabilities that came with each token. `cached` counts the
    prompt's tokens by the tier they came from."""

    request_id: str
    cached: Mapping[str, int]
    exactness: Exactness

    @property
    def num_cached(self) -> int:
        return sum(self.cached.values())


Tried = ServedAnswer | NotTried


def served_answer(prompt: Prompt, request_id: str, found: Generated) -> ServedAnswer:
    """The answer that has come whole."""
    assert found.usage is not None, "an answer ends with its usage"
    assert found.exactness is not None, "and with its level"
    return ServedAnswer(
        prompt,
        tuple(found.token_ids),
        _digests(found.token_ids, found.logprobs),
        request_id,
        found.usage.cached.by_tier,
        found.exactness,
    )


def greedy(num_tokens: int) -> SamplingParams:
    """So many tokens, each with all the log probabilities that may be asked for."""
    return SamplingParams(
        max_tokens=num_tokens, temperature=0.0, logprobs=MAX_LOGPROBS, ignore_eos=True
    )


class ColdCompletions:
    """The answers of the cold run, in this process, each computed once and alone. `llm` has the
    options COLD."""

    def __init__(self, llm: LLM, num_tokens: int) -> None:
        self._llm = llm
        self._num_tokens = num_tokens
        self._known: dict[Prompt, ComparedAnswer] = {}

    def answer(self, prompt: Prompt) -> ComparedAnswer:
        if prompt not in self._known:
            before = self._llm.counts.prefill_steps
            (found,) = self._llm.generate([prompt], greedy(self._num_tokens))
            assert torch.get_num_threads() == 1, "the cold run has one thread"
            assert self._llm.counts.prefill_steps == before + 1, "the cold run has one chunk"
            assert not sum(found.cached_tokens.values()), "the cold run finds nothing"
            digests = _digests(found.token_ids, found.logprobs)
            self._known[prompt] = ComparedAnswer(prompt, found.token_ids, digests)
        return self._known[prompt]


def _digests(
    token_ids: Sequence[int], logprobs: Sequence[Mapping[int, float]]
) -> tuple[bytes, ...]:
    """The bits of each token's log probabilities, in the order of token ids."""
    assert len(logprobs) == len(token_ids), "each token has its log probabilities"
    return tuple(
        b"".join(struct.pack("<Id", *entry) for entry in sorted(each.items())) for each in logprobs
    )
