"""The curriculum: when stories grow, and how fast the weights may move."""

from __future__ import annotations

import pytest
import torch
from tools.demo.beginning import prepare
from tools.demo.network import Network, Shape
from tools.demo.training import FIRST_LEN, LAST_LEN, Course, Optimisers, Progress, warmth


def test_stories_double_in_length_once_accuracy_holds_above_the_mark() -> None:
    progress = Progress()
    for _ in range(30):
        progress.record(1.0)
    assert progress.length == FIRST_LEN
    for _ in range(200):
        progress.record(1.0)
    assert progress.length > FIRST_LEN
    for _ in range(2000):
        progress.record(1.0)
    assert progress.length == LAST_LEN


def test_a_bad_lesson_keeps_the_length() -> None:
    progress = Progress()
    for _ in range(500):
        progress.record(0.5)
    assert progress.length == FIRST_LEN


def test_the_rate_rises_holds_and_falls() -> None:
    course = Course(seconds=100.0, cooling=0.5)
    assert warmth(course, Progress(step=0), 0.0) == pytest.approx(0.01)
    assert warmth(course, Progress(step=500), 40.0) == 1.0
    assert warmth(course, Progress(step=500), 75.0) == pytest.approx(0.5)
    assert warmth(course, Progress(step=500), 100.0) == pytest.approx(0.01)


def test_every_weight_has_one_optimiser_and_moves() -> None:
    torch.manual_seed(2)
    network = Network(Shape(vocab=64))
    prepare(network)
    before = [weight.clone() for weight in network.parameters()]
    token_ids = torch.randint(0, 64, (2, 32))
    network(token_ids, torch.ones_like(token_ids, dtype=torch.bool)).logsumexp(-1).sum().backward()
    Optimisers.of(network, 1e-2).step(1.0)
    for old, new in zip(before, network.parameters(), strict=True):
        assert not torch.equal(old, new)
