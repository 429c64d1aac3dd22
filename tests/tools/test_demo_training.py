"""The curriculum: the growth of stories, and the speed of the weights."""

from __future__ import annotations

import pytest
import torch
from tools.demo.init_weights import arrange_weights
from tools.demo.network import DemoShape, Network
from tools.demo.training import (
    FIRST_LEN,
    LAST_LEN,
    Optimisers,
    TrainingOptions,
    TrainingProgress,
    rate_factor,
)


def test_stories_double_in_length_once_accuracy_holds_above_the_mark() -> None:
    progress = TrainingProgress()
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
    progress = TrainingProgress()
    for _ in range(500):
        progress.record(0.5)
    assert progress.length == FIRST_LEN


def test_the_rate_rises_holds_and_falls() -> None:
    options = TrainingOptions(seconds=100.0, cooling=0.5)
    assert rate_factor(options, TrainingProgress(step=0), 0.0) == pytest.approx(0.01)
    assert rate_factor(options, TrainingProgress(step=500), 40.0) == 1.0
    assert rate_factor(options, TrainingProgress(step=500), 75.0) == pytest.approx(0.5)
    assert rate_factor(options, TrainingProgress(step=500), 100.0) == pytest.approx(0.01)


def test_every_weight_has_one_optimiser_and_moves() -> None:
    torch.manual_seed(2)
    network = Network(DemoShape(vocab=64))
    arrange_weights(network)
    before = [weight.clone() for weight in network.parameters()]
    token_ids = torch.randint(0, 64, (2, 32))
    network(token_ids, torch.ones_like(token_ids, dtype=torch.bool)).logsumexp(-1).sum().backward()
    Optimisers.of(network, 1e-2).step(1.0)
    for old, new in zip(before, network.parameters(), strict=True):
        assert not torch.equal(old, new)
