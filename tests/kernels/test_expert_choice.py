"""Experts by ranks: on a card in one launch, one warp a token, and on a processor in one loop,
against a naive choice in Python."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from tests.kernels.row_bits import PLACES, check_rows, drawn
from torch import Tensor

from ferryman_kernels.cpu._compiled import numba
from ferryman_kernels.elementwise._expert_choice_compiled import MOST_CHOSEN
from ferryman_kernels.elementwise.expert_choice import (
    NO_NUMBERS,
    ExpertGroups,
    ExpertNumbers,
    ExpertRule,
    Measure,
    ShareSum,
    choose_experts,
    choose_experts_reference,
    choose_experts_triton,
    choose_one_by_one,
    choose_one_by_one_triton,
)

NUMPY_WARNS = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""The interpreter computes by numpy, which warns of what a card does without a word."""

EXPERTS = 24
BIAS = ExpertNumbers(bias=(torch.arange(EXPERTS) * 5 % 8 - 4) / 8)
SCALES = ExpertNumbers(scales=torch.linspace(0.5, 2.0, EXPERTS))
SCALES_OF_MANY = ExpertNumbers(scales=torch.linspace(0.5, 2.0, 200))
RULES: dict[str, tuple[ExpertRule, ExpertNumbers]] = {
    "softmax of the chosen": (ExpertRule(4, Measure.SOFTMAX_OF_CHOSEN), NO_NUMBERS),
    "softmax of the chosen, scaled": (ExpertRule(3, Measure.SOFTMAX_OF_CHOSEN), SCALES),
    "softmax": (ExpertRule(5, Measure.SOFTMAX, scaling=2.5), NO_NUMBERS),
    "softmax in groups": (
        ExpertRule(6, Measure.SOFTMAX, ExpertGroups(3, 2), scaling=16.0),
        NO_NUMBERS,
    ),
    "softmax and a bias": (ExpertRule(6, Measure.SOFTMAX, sum=ShareSum(least=0.3)), BIAS),
    "one sigmoid": (ExpertRule(1, Measure.SIGMOID), NO_NUMBERS),
    "sigmoids to one": (ExpertRule(2, Measure.SIGMOID, sum=ShareSum()), NO_NUMBERS),
    "sigmoid and a bias": (ExpertRule(4, Measure.SIGMOID, sum=ShareSum(1e-6)), BIAS),
    "sigmoid in groups": (
        ExpertRule(8, Measure.SIGMOID, ExpertGroups(6, 3, 2), ShareSum(1e-20), 1.5),
        BIAS,
    ),
    "sigmoid of the chosen by biased scores": (
        ExpertRule(4, Measure.SIGMOID_OF_CHOSEN, sum=ShareSum()),
        BIAS,
    ),
    "root of softplus": (ExpertRule(3, Measure.SQRT_SOFTPLUS), NO_NUMBERS),
    "root of softplus and a bias": (
        ExpertRule(6, Measure.SQRT_SOFTPLUS, sum=ShareSum(1e-20), scaling=1.5),
        BIAS,
    ),
    "sigmoid of the chosen": (ExpertRule(2, Measure.SIGMOID_OF_CHOSEN), NO_NUMBERS),
    "all of two groups": (ExpertRule(8, Measure.SIGMOID, ExpertGroups(6, 2, 2)), BIAS),
}


def scores(tokens: int) -> Tensor:
    """Multiples of a half, so that many experts tie."""
    return (torch.randn(tokens, EXPERTS) * 3).round() / 2


def best_of(ranks: Sequence[float], count: int) -> list[int]:
    return sorted(range(len(ranks)), key=lambda index: (-ranks[index], index))[:count]


def softmax_of(values: Sequence[float]) -> list[float]:
    powers = [math.exp(value - max(values)) for value in values]
    return [power / sum(powers) for power in powers]


def naive_choice(
    row: Sequence[float], rule: ExpertRule, numbers: ExpertNumbers
) -> tuple[list[float], list[int]]:
    """The lowest index of equal ranks wins."""
    measures = [1 / (1 + math.exp(-score)) for score in row]
    if rule.measure is Measure.SOFTMAX:
        measures = softmax_of(row)
    if rule.measure is Measure.SQRT_SOFTPLUS:
        measures = [math.sqrt(math.log1p(math.exp(score))) for score in row]
    ranks, groups, size = list(row), rule.groups, len(row) // rule.groups.count
    if numbers.bias is not None:
        biased = row if rule.measure is Measure.SIGMOID_OF_CHOSEN else measures
        ranks = [a + b for a, b in zip(biased, numbers.bias.tolist(), strict=True)]
    parts = [ranks[start : start + size] for start in range(0, len(row), size)]
    merits = [sum(sorted(part)[-groups.best_experts :]) for part in parts]
    open_groups = best_of(merits, groups.per_token)
    inside = [
        rank if index // size in open_groups else -math.inf for index, rank in enumerate(ranks)
    ]
    chosen = best_of(inside, rule.per_token)
    shares = [measures[index] for index in chosen]
    if rule.measure is Measure.SOFTMAX_OF_CHOSEN:
        shares = softmax_of([row[index] for index in chosen])
    if rule.sum is not None:
        divisor = max(sum(shares) + rule.sum.added, rule.sum.least)
        shares = [share / divisor for share in shares]
    scales = [1.0] * len(row) if numbers.scales is None else numbers.scales.tolist()
    return [
        rule.scaling * scales[index] * share for share, index in zip(shares, chosen, strict=True)
    ], chosen


def moved(numbers: ExpertNumbers, device: torch.device, dtype: torch.dtype) -> ExpertNumbers:
    bias, scales = (
        None if part is None else part.to(device, dtype) for part in (numbers.bias, numbers.scales)
    )
    return ExpertNumbers(bias, scales)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 4e-7), (torch.float64, 1e-14)])
def test_the_greatest_ranks_are_chosen_and_the_lowest_index_of_equal_ones(
    name: str, dtype: torch.dtype, error: float, device: torch.device
) -> None:
    (rule, numbers), rows = RULES[name], scores(12)
    rows[0], rows[1] = 0, -rows[1].abs() - 80  # all equal; far below zero
    shares, chosen = choose_experts_triton(
        rows.to(device, dtype), rule, moved(numbers, device, dtype), dtype
    )
    assert shares.dtype == dtype
    for index, row in enumerate(rows.tolist()):
        right, places = naive_choice(row, rule, numbers)
        assert chosen[index].tolist() == places
        assert shares[index].tolist() == pytest.approx(right, rel=error, abs=1e-30)


@pytest.mark.parametrize("name", RULES)
def test_the_processor_chooses_the_same_where_no_ranks_are_equal(
    name: str, device: torch.device
) -> None:
    (rule, numbers), x = RULES[name], torch.randn(10, EXPERTS)
    on_card = moved(numbers, device, torch.float32)
    shares, chosen = choose_experts_triton(x.to(device), rule, on_card, torch.float32)
    right_shares, right = choose_experts(x, rule, numbers, torch.float32)
    assert torch.equal(chosen.cpu(), right)
    torch.testing.assert_close(shares.cpu(), right_shares, rtol=5e-7, atol=0)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_has_its_own_bits_among_any_others(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    rule, numbers = RULES[name][0], moved(RULES[name][1], device, torch.float32)
    rows = torch.cat((scores(4), torch.randn(3, EXPERTS))).to(device, dtype)
    shares, chosen = choose_experts_triton(rows, rule, numbers, dtype)
    wide = torch.cat((rows, rows), dim=1)[:, EXPERTS:]
    again = choose_experts_triton(wide, rule, numbers, dtype)
    assert torch.equal(again[0], shares)
    assert torch.equal(again[1], chosen)
    for index, row in enumerate(rows):
        alone = choose_experts_triton(row[None], rule, numbers, dtype)
        assert torch.equal(alone[0][0], shares[index])
        assert torch.equal(alone[1][0], chosen[index])
    assert choose_experts_triton(rows[:0], rule, numbers, dtype)[1].shape == (0, rule.per_token)


def test_scores_in_bfloat16_are_numbers_and_shares_are_rounded_once(device: torch.device) -> None:
    rows = torch.randn(6, EXPERTS).to(device, torch.bfloat16)
    rule = ExpertRule(4, Measure.SOFTMAX_OF_CHOSEN)
    of_bfloat16, of_float32, of_float64 = (
        choose_experts_triton(x, rule, NO_NUMBERS, torch.float32)
        for x in (rows, rows.float(), rows.double())
    )
    assert all(map(torch.equal, of_bfloat16, of_float32))
    precise = choose_experts_triton(rows.double(), rule, NO_NUMBERS, torch.float64)
    assert torch.equal(of_float64[0], precise[0].float())
    assert torch.equal(of_float64[1], of_float32[1])


@NUMPY_WARNS
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_experts_are_distinct_and_exist_whatever_the_scores_are(
    name: str, value: float, device: torch.device
) -> None:
    """An index out of range would read another's memory; padding has such rows."""
    rule, numbers = RULES[name][0], moved(RULES[name][1], device, torch.float32)
    rows = scores(3).to(device)
    whole = choose_experts_triton(rows[2:], rule, numbers, torch.float32)
    rows[0], rows[1, 5] = value, value
    shares, chosen = choose_experts_triton(rows, rule, numbers, torch.float32)
    for row in chosen.tolist():
        assert len(set(row)) == rule.per_token
        assert set(row) <= set(range(EXPERTS))
    assert torch.equal(shares[2], whole[0][0])
    assert torch.equal(chosen[2], whole[1][0])


def test_zeros_of_both_signs_are_equal_ranks(device: torch.device) -> None:
    rows = torch.tensor([[-1.0, -0.0, 0.0, -2.0], [-1.0, 0.0, -0.0, -2.0]], device=device)
    rule = ExpertRule(2, Measure.SOFTMAX_OF_CHOSEN)
    shares, chosen = choose_experts_triton(rows, rule, NO_NUMBERS, torch.float32)
    assert chosen.tolist() == [[1, 2], [1, 2]]
    assert shares.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_shares_too_small_for_their_type_are_chosen_by_score(device: torch.device) -> None:
    row = torch.full((1, EXPERTS), -300.0, device=device)
    row[0, 20], row[0, 9], row[0, 13] = 0.0, -200.0, -150.0
    rule = ExpertRule(3, Measure.SOFTMAX)
    assert choose_experts_triton(row, rule, NO_NUMBERS, torch.float32)[1].tolist() == [[20, 13, 9]]


SOFTMAXES = ("softmax of the chosen", "softmax of the chosen, scaled")


@pytest.mark.skipif(numba is None, reason="there are no compiled loops")
@pytest.mark.parametrize("name", SOFTMAXES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_processor_gives_a_softmax_over_the_chosen_the_lowest_index_of_equal_scores(
    name: str, dtype: torch.dtype
) -> None:
    (rule, numbers), rows = RULES[name], scores(40)
    rows[0], rows[1] = 0, -rows[1].abs() - 80
    shares, chosen = choose_experts(rows.to(dtype), rule, numbers, dtype)
    assert shares.dtype is dtype
    for index, row in enumerate(rows.tolist()):
        right, places = naive_choice(row, rule, numbers)
        assert chosen[index].tolist() == places
        error = 4e-7 if dtype is torch.float32 else 4e-3
        assert shares[index].tolist() == pytest.approx(right, rel=error, abs=1e-30)


@pytest.mark.parametrize("per_token", [1, 2, 4, 8, MOST_CHOSEN, MOST_CHOSEN + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_processors_shares_have_the_bits_of_torch_with_avx_512_where_no_scores_are_equal(
    per_token: int, dtype: torch.dtype
) -> None:
    # All numbers of bfloat16 from 0.25 to 16, and their negatives: 200 of them in each row.
    positive = torch.arange(0x3E80, 0x4180, dtype=torch.int16).view(torch.bfloat16).float()
    distinct = torch.cat((positive, -positive))
    rows = torch.stack([distinct[torch.randperm(len(distinct))[:200]] for _ in range(300)])
    x = rows.to(dtype)
    rule = ExpertRule(per_token, Measure.SOFTMAX_OF_CHOSEN, scaling=1.5)
    shares, chosen = choose_experts(x, rule, SCALES_OF_MANY, dtype)
    right_shares, right = choose_experts_reference(x, rule, SCALES_OF_MANY, dtype)
    assert torch.equal(chosen, right)
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        assert torch.equal(shares, right_shares)
    # Without it torch adds the powers in another order, or has another exponential.
    error = 1e-6 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(shares, right_shares, rtol=error, atol=0)


@pytest.mark.parametrize("name", SOFTMAXES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=30)
@given(places=PLACES)
def test_a_row_of_the_processor_has_its_own_bits_at_every_place(
    name: str, dtype: torch.dtype, places: tuple[int, tuple[int, int]]
) -> None:
    (rule, numbers), (tokens, (first, end)) = RULES[name], places
    x = drawn(tokens, EXPERTS, dtype)

    def shares(rows: Tensor) -> Tensor:
        return choose_experts(rows, rule, numbers, dtype)[0]

    def chosen(rows: Tensor) -> Tensor:
        return choose_experts(rows, rule, numbers, dtype)[1]

    check_rows(shares, x, slice(first, end), 2)
    check_rows(chosen, x, slice(first, end), 2)


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("name", SOFTMAXES)
def test_experts_of_the_processor_are_distinct_and_exist(name: str, value: float) -> None:
    (rule, numbers), rows = RULES[name], scores(3)
    whole = choose_experts(rows[2:], rule, numbers, torch.float32)
    rows[0], rows[1, 5] = value, value
    shares, chosen = choose_experts(rows, rule, numbers, torch.float32)
    for row in chosen.tolist():
        assert len(set(row)) == rule.per_token
        assert set(row) <= set(range(EXPERTS))
    assert shares[0].isnan().all()
    assert shares[1].isnan().all() == (value != -math.inf)
    assert torch.equal(shares[2], whole[0][0])
    assert torch.equal(chosen[2], whole[1][0])


def naive_two(row: Sequence[float], jitter: float) -> tuple[list[float], list[int]]:
    left, shares, chosen = list(range(len(row))), list[float](), list[int]()
    for _ in range(2):
        best = max(row[index] for index in left)
        near = [
            row[index]
            for index in left
            if not (best - row[index]) > 2 * jitter * max(abs(row[index]), best)
        ]
        chosen.append(next(index for index in left if row[index] == best))
        shares.append(1 / sum(math.exp(score - best) for score in near))
        left.remove(chosen[-1])
    return shares, chosen


@NUMPY_WARNS
@pytest.mark.parametrize("jitter", [0.01, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_two_experts_one_by_one(jitter: float, dtype: torch.dtype, device: torch.device) -> None:
    rows = torch.cat((scores(5)[:, :13], torch.randn(5, 13) + 1, torch.zeros(1, 13)))
    shares, chosen = choose_one_by_one_triton(rows.to(device, dtype), jitter, dtype)
    by_processor = choose_one_by_one(rows[5:10].to(dtype), jitter, dtype)
    assert torch.equal(chosen[5:10].cpu(), by_processor[1])
    torch.testing.assert_close(shares[5:10].cpu(), by_processor[0], rtol=5e-7, atol=0)
    for index, row in enumerate(rows.tolist()):
        right, places = naive_two(row, jitter)
        assert chosen[index].tolist() == places
        assert shares[index].tolist() == pytest.approx(right, rel=5e-7)
        alone = choose_one_by_one_triton(rows[index, None].to(device, dtype), jitter, dtype)
        assert torch.equal(alone[0][0], shares[index])


@NUMPY_WARNS
def test_two_experts_are_distinct_whatever_the_scores_are(device: torch.device) -> None:
    rows = torch.tensor([[math.nan] * 5, [-math.inf] * 5, [math.inf] * 5, [0.0, 1, 2, 3, math.nan]])
    chosen = choose_one_by_one_triton(rows.to(device), 0.01, torch.float32)[1].tolist()
    assert all(len(set(row)) == 2 and set(row) <= set(range(5)) for row in chosen)
