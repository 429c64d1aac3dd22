"""Greedy answers of a GGUF file, by Ferryman and by llama.cpp, token by token.

llama.cpp follows our tokens, so that each row says how near its likeliest token was to ours where
the two part for the first time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tools.bench.llama_contender import LlamaContender, LlamaContext
from tools.bits.smollm2 import QUESTIONS
from tools.markdown_table import short_table

from ferryman.llm import LLM, Completion
from ferryman.schedule.request import SamplingParams
from ferryman.text.tokenizer import Tokenizer
from ferryman_bench.engine_process import BenchModel

HEAD = ("chat", "prompt", "tokens", "first differing", "margin there", "margin here")
MEMORY_BYTES = 400 << 20
ALTERNATIVES = 5


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first place where llama.cpp's likeliest token is another than ours. `theirs` is its log
    probability of that token less that of ours, `ours` the same here, or None if that token was not
    among our likeliest ones."""

    place: int
    theirs: float
    ours: float | None

    @property
    def cells(self) -> tuple[str, str, str]:
        here = "-" if self.ours is None else f"{-self.ours:.3f}"
        return str(self.place), f"{self.theirs:.3f}", here


def compared_answers(file: Path, dtype: str, chats: int, tokens: int) -> list[str]:
    """The lines of a table in Markdown: a row for each chat."""
    encode = Tokenizer.load(file).encode_chat
    prompts = [encode([{"role": "user", "content": text}]).tolist() for text in QUESTIONS[:chats]]
    greedy = SamplingParams(max_tokens=tokens, temperature=0.0, logprobs=ALTERNATIVES)
    with LLM(model=file, dtype=dtype, memory_bytes=MEMORY_BYTES) as llm:
        answers = llm.generate(prompts, greedy)
    theirs = LlamaContender(BenchModel(file, "float32", threads=2))
    return short_table(HEAD, _rows(theirs, answers), long=5)


def _rows(theirs: LlamaContender, answers: Sequence[Completion]) -> Iterator[tuple[str, ...]]:
    for number, answer in enumerate(answers, start=1):
        prompt, tokens = answer.prompt_token_ids, answer.token_ids
        context = theirs.context(1, len(prompt) + len(tokens), is_exact=True)
        difference = _first_difference(context, answer)
        cells = ("none", "", "") if difference is None else difference.cells
        yield str(number), str(len(prompt)), str(len(tokens)), *cells


def _first_difference(context: LlamaContext, answer: Completion) -> FirstDifference | None:
    prompt = answer.prompt_token_ids
    context.prefill(np.array(prompt, np.int32))
    for place, token in enumerate(answer.token_ids):
        logits = context.logits(1)[0].astype(np.float64)
        likeliest = int(logits.argmax())
        if likeliest != token:
            scores = answer.logprobs[place]
            ours = scores[likeliest] - scores[token] if likeliest in scores else None
            return FirstDifference(place, float(logits[likeliest] - logits[token]), ours)
        if place == 0:
            context.ready_to_decode()
        context.decode(np.array([token], np.int32), len(prompt) + place)
    return None
