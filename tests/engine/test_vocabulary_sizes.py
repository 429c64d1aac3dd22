"""Arrays with a place for each token id, at sizes around a multiple of 32, 64 and 128.

Masks come in words of 32 bits from a library that decides their size itself. The other arrays over
a vocabulary are made and filled here: each is compared with plain Python at the same sizes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ferryman.engine.forward.draw_tensors import DrawTensors
from ferryman.engine.forward.grammar_masks import GrammarMasks
from ferryman.engine.forward.step_tensors import pack, unpack
from ferryman.engine.forward.token_source import Sampler
from ferryman.grammar.compiler import GrammarCompiler
from ferryman.grammar.matcher import MaskSizeDiffers, fitted, num_words
from ferryman.grammar.vocabulary import GrammarVocabulary
from ferryman.model.sampling.prompt_logprobs import PrefilledRows, ScoredRows, prompt_logprobs
from ferryman.schedule.batch import NO_CHOICE, DecodeStep, SampleRequest, SlotOps
from ferryman.schedule.output_grammar import OutputGrammar
from ferryman.schedule.request import SamplingParams
from ferryman.schedule.token_rules import TokenRules

SIZES = [31, 32, 33, 1209, 32767, 32768, 32769]
GUIDED = SamplingParams(temperature=0.0, grammar=OutputGrammar.regex("[ab]+"))
PROMPT_LEN = 2


def vocabulary_of(size: int) -> GrammarVocabulary:
    """Token 0 is a, the last but one is b, and the last one is the end."""
    pieces = [b"a", *(b"x%d" % number for number in range(size - 3)), b"b", b""]
    return GrammarVocabulary(tuple(pieces), {size - 1: "</s>"}, frozenset({size - 1}), lambda _: [])


def drawn(
    logits: Tensor, *params: SamplingParams, size: int = 0, output: tuple[int, ...] = ()
) -> list[int]:
    """A token for each row of `logits`, behind `output`, by way of the packed step."""
    told, history = tensors(logits, params, output)
    masks = GrammarMasks(GrammarCompiler(lambda: vocabulary_of(size or logits.shape[1])))
    return [int(token) for token in Sampler(masks).tokens(logits, told, history).token_ids]


def tensors(
    logits: Tensor, params: tuple[SamplingParams, ...], output: tuple[int, ...]
) -> tuple[DrawTensors, Tensor]:
    rows, position = np.arange(len(params)), PROMPT_LEN + len(output)
    draws = tuple(SampleRequest(int(row), position, PROMPT_LEN, params[row]) for row in rows)
    step = DecodeStep(
        1, SlotOps(), tuple(map(str, rows)), rows, rows, rows, rows, (len(rows),), {}, draws
    )
    packed = pack(step)
    history = torch.zeros((len(params), position + 1), dtype=torch.int32)
    history[:, PROMPT_LEN:position] = torch.tensor(output, dtype=torch.int32)
    return unpack(packed, torch.from_numpy(packed.buffer), draws).draws, history


def rising(size: int, rows: int = 1) -> Tensor:
    """The last token is the likeliest."""
    return torch.linspace(-3.0, 3.0, size).repeat(rows, 1)


@pytest.mark.parametrize("size", SIZES)
def test_a_mask_allows_the_first_and_the_last_token_of_any_vocabulary(size: int) -> None:
    assert drawn(rising(size), GUIDED) == [size - 2], "b, for the end may not come first"
    assert drawn(rising(size), GUIDED, output=(0,)) == [size - 1]
    assert drawn(-rising(size), GUIDED, output=(0,)) == [0]
    assert drawn(rising(size, 2), SamplingParams(temperature=0.0), GUIDED) == [size - 1, size - 2]


@pytest.mark.parametrize("padding", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("size", SIZES)
def test_logits_beyond_the_tokenizer_are_never_drawn_under_a_grammar(
    size: int, padding: int
) -> None:
    assert drawn(rising(size + padding), GUIDED, size=size) == [size - 2]
    assert drawn(rising(size + padding), GUIDED, size=size, output=(0,)) == [size - 1]


@pytest.mark.parametrize("size", SIZES)
def test_a_dead_end_is_one_at_any_size(size: int) -> None:
    assert drawn(rising(size), GUIDED, output=(1,)) == [NO_CHOICE]


@pytest.mark.parametrize("size", SIZES)
def test_a_mask_of_another_size_is_refused_where_it_arrives(size: int) -> None:
    words, full = num_words(size), np.zeros(num_words(size + 1), np.uint32)
    assert len(fitted(full.tobytes(), size)) == words
    full[words - 1] = 1
    assert fitted(full.tobytes(), size)[-1] == 1
    for wrong in (words - 1, words + 2):
        with pytest.raises(MaskSizeDiffers, match=f"{wrong} words came"):
            fitted(np.zeros(wrong, np.uint32).tobytes(), size)
    beyond = np.zeros(num_words(size + 1), np.uint32)
    beyond[size // 32] = np.uint32(1 << (size % 32))
    with pytest.raises(MaskSizeDiffers, match="beyond the vocabulary"):
        fitted(beyond.tobytes(), size)


@pytest.mark.parametrize("size", SIZES)
def test_rules_reach_the_first_and_the_last_token(size: int) -> None:
    last = size - 1
    rules = [
        TokenRules(logit_bias=((0, 100.0),)),
        TokenRules(logit_bias=((last, -100.0),)),
        TokenRules(allowed_token_ids=(0, last - 1)),
        TokenRules(allowed_token_ids=(last,)),
        TokenRules(bad_words=((last,), (0, last - 1))),
    ]
    params = [SamplingParams(temperature=0.0, rules=rule) for rule in rules]
    expected = [0, last - 1, last - 1, last, last - 2]
    assert drawn(rising(size, len(rules)), *params, output=(0,)) == expected


@pytest.mark.parametrize("size", SIZES)
def test_penalties_count_the_last_token(size: int) -> None:
    last = size - 1
    params = [
        SamplingParams(temperature=0.0, presence_penalty=2.0),
        SamplingParams(temperature=0.0, frequency_penalty=-2.0),
    ]
    logits = rising(size, 2)
    assert drawn(logits, *params, output=(last, last))[0] != last
    assert drawn(logits, *params, output=(last, last))[1] == last


@pytest.mark.parametrize("size", SIZES)
def test_filters_keep_the_last_token_when_it_alone_is_likely(size: int) -> None:
    logits = torch.zeros(4, size)
    logits[:, -1] = 60.0
    plain = SamplingParams(temperature=1.0, seed=3)
    params = [plain, replace(plain, top_k=1), replace(plain, top_p=0.5), replace(plain, min_p=0.5)]
    assert drawn(logits, *params) == [size - 1] * 4


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_best", [1, 20])
def test_logprobs_name_the_likeliest_up_to_the_last_token(size: int, num_best: int) -> None:
    logits = rising(size)
    told, history = tensors(logits, (SamplingParams(temperature=0.0, logprobs=num_best),), ())
    values, token_ids = Sampler().tokens(logits, told, history).best
    expected = [size - 1, *range(size - 1, size - 1 - num_best, -1)]
    assert token_ids[0].tolist() == expected
    whole = logits[0].double()
    exact = (whole - whole.exp().sum().log())[expected]
    assert values[0].tolist() == pytest.approx(exact.tolist(), abs=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_scores_of_a_prompt_rank_the_first_and_the_last_token(size: int) -> None:
    prefilled = PrefilledRows(rising(size, 2), lambda hidden: hidden)
    scored = ScoredRows(torch.tensor([0, 1]), torch.tensor([0, size - 1]), 2)
    _, token_ids, ranks = prompt_logprobs(prefilled, scored)
    assert token_ids.tolist() == [[0, size - 1, size - 2], [size - 1, size - 1, size - 2]]
    assert ranks.tolist() == [size, 1]
