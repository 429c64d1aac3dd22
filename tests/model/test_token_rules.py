"""Biases, bans, allowed tokens and bad words against the same rules in plain Python."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny_models import VOCAB_SIZE, save_tiny_model

from ferryman.engine.forward.draw_tensors import DrawTensors
from ferryman.engine.forward.step_tensors import pack, unpack
from ferryman.engine.forward.token_source import Sampler
from ferryman.errors import InvalidRequest
from ferryman.llm import LLM
from ferryman.schedule.batch import DecodeStep, SampleRequest, SlotOps
from ferryman.schedule.request import SamplingParams
from ferryman.schedule.token_rules import MAX_ALLOWED, MAX_BAD_WORDS, MAX_BIASES, TokenRules

VOCAB = 24


def naive_ruled(
    logits: Sequence[float], rules: TokenRules, output: Sequence[int], stops: frozenset[int]
) -> list[float]:
    biases = dict(rules.logit_bias)
    found = [logit + biases.get(token, 0.0) for token, logit in enumerate(logits)]
    for token in range(len(found)):
        is_banned = rules.allowed_token_ids and token not in rules.allowed_token_ids
        is_early_end = len(output) < rules.min_tokens and token in stops
        ends_a_word = any(
            word[-1] == token
            and list(word[:-1]) == list(output[len(output) - len(word) + 1 :])
            and len(output) >= len(word) - 1
            for word in rules.bad_words
        )
        if is_banned or is_early_end or ends_a_word:
            found[token] = -math.inf
    return found


def some_rules(rng: random.Random, output: Sequence[int]) -> TokenRules:
    tokens = rng.sample(range(VOCAB), 6)
    words = [(tokens[0],), (tokens[1], tokens[2]), (*output[-2:], tokens[3])]
    return TokenRules(
        min_tokens=rng.choice([0, 1, 5]),
        logit_bias=((tokens[4], rng.uniform(-9, 9)), (tokens[5], 3.0))
        if rng.random() < 0.6
        else (),
        allowed_token_ids=tuple(rng.sample(range(VOCAB), 9)) if rng.random() < 0.4 else (),
        bad_words=tuple(words) if rng.random() < 0.6 else (),
    )


@pytest.mark.parametrize("seed", range(20))
def test_each_row_is_drawn_by_its_own_rules(seed: int) -> None:
    rng = random.Random(seed)
    cases = []
    for _ in range(7):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 5))]
        output = [rng.randrange(VOCAB) for _ in range(rng.randrange(0, 7))]
        rules = some_rules(rng, output) if rng.random() < 0.8 else TokenRules()
        cases.append((prompt, output, rules, frozenset(rng.sample(range(VOCAB + 9), 5))))
    history = torch.full((len(cases), 16), -1, dtype=torch.int32)
    for row, (prompt, output, _, _) in enumerate(cases):
        history[row, : len(prompt) + len(output)] = torch.tensor([*prompt, *output])
    logits = torch.randn(len(cases), VOCAB, dtype=torch.float64, generator=_generator(seed))
    draws = [
        SampleRequest(
            row, len(p) + len(o), len(p), SamplingParams(temperature=0.0, rules=rules), stops
        )
        for row, (p, o, rules, stops) in enumerate(cases)
    ]
    tokens = Sampler().tokens(logits, _tensors(draws), history).token_ids
    for row, (_, output, rules, stops) in enumerate(cases):
        ruled = naive_ruled(logits[row].tolist(), rules, output, stops)
        if max(ruled) > -math.inf:
            assert tokens[row] == max(range(VOCAB), key=lambda token: (ruled[token], -token))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _tensors(draws: Sequence[SampleRequest]) -> DrawTensors:
    nothing = np.zeros(len(draws), dtype=np.int64)
    step = DecodeStep(
        step_id=1,
        ops=SlotOps(),
        request_ids=tuple(str(draw.row) for draw in draws),
        rows=np.array([draw.row for draw in draws]),
        positions=np.array([draw.position - 1 for draw in draws]),
        read_slots=nothing,
        write_slots=nothing,
        verify_depths=(len(draws),),
        page_tables={},
        draws=tuple(draws),
    )
    packed = pack(step)
    return unpack(packed, torch.from_numpy(packed.buffer.copy())).draws


def test_an_output_follows_its_rules(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "granite_nope")
    prompt = [7, 8, 9] * 6
    with LLM(tmp_path, dtype="float64", page_size=8, memory_bytes=1 << 22) as llm:
        plain = _said(llm, prompt, TokenRules())
        found = plain[3]
        assert found not in _said(llm, prompt, TokenRules(bad_words=((found,),)))
        assert found not in _said(llm, prompt, TokenRules(logit_bias=((found, -100.0),)))
        wanted = tuple(range(20, 30))
        assert set(_said(llm, prompt, TokenRules(allowed_token_ids=wanted))) <= set(wanted)
        assert set(_said(llm, prompt, TokenRules(logit_bias=((33, 100.0),)))) == {33}
        pair = tuple(plain[2:4])
        pairs = list(pairwise(_said(llm, prompt, TokenRules(bad_words=(pair,)))))
        assert pair not in pairs
        assert pairs[0][0] == plain[0], "its tokens alone are not forbidden"
        stops = tuple(range(40))
        for least in (0, 5):
            params = SamplingParams(
                max_tokens=12,
                temperature=0.0,
                stop_token_ids=stops,
                rules=TokenRules(min_tokens=least),
                ignore_eos=True,
            )
            (answer,) = llm.generate([prompt], params)
            assert len(answer.token_ids) >= max(1, least)
            assert not set(answer.token_ids[:least]) & set(stops)


def _said(llm: LLM, prompt: list[int], rules: TokenRules) -> list[int]:
    params = SamplingParams(max_tokens=12, temperature=0.0, rules=rules, ignore_eos=True)
    return list(llm.generate([prompt], params)[0].token_ids)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no number": ({"min_tokens": "1"}, "min_tokens"),
    "less than nothing": ({"min_tokens": -1}, "min_tokens"),
    "a bias too large": ({"logit_bias": ((1, 101.0),)}, "logit_bias"),
    "a bias that is no number": ({"logit_bias": ((1, math.nan),)}, "logit_bias"),
    "one token twice": ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias"),
    "too many biases": ({"logit_bias": ((1, 1.0),) * (MAX_BIASES + 1)}, "logit_bias"),
    "a negative id": ({"allowed_token_ids": (-1,)}, "allowed_token_ids"),
    "too many allowed": ({"allowed_token_ids": (1,) * (MAX_ALLOWED + 1)}, "allowed_token_ids"),
    "an empty word": ({"bad_words": ((),)}, "bad_words"),
    "a long word": ({"bad_words": ((1,) * 33,)}, "bad_words"),
    "too many words": ({"bad_words": ((1,),) * (MAX_BAD_WORDS + 1)}, "bad_words"),
}


@pytest.mark.parametrize(("values", "param"), BAD.values(), ids=BAD.keys())
def test_rules_that_mean_nothing_are_named(values: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        TokenRules(**values)
    assert caught.value.param == param


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "granite_nope")
    with (
        LLM(tmp_path, dtype="float64", page_size=8, memory_bytes=1 << 22) as llm,
        pytest.raises(InvalidRequest, match="out of range"),
    ):
        _said(llm, [7], TokenRules(allowed_token_ids=(VOCAB_SIZE,)))
