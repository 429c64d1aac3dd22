"""Training: loss on answers only, many questions a story, longer stories as accuracy grows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from tools.demo import vocabulary_words as words
from tools.demo.curriculum import TrainingBatch, training_batch
from tools.demo.network import Network
from tools.demo.vocabulary import token_id
from torch import Tensor
from torch.nn import functional
from torch.optim import AdamW, Muon, Optimizer

FIRST_LEN, LAST_LEN = 64, 4096
TALK_LEN = 256
MARK = 0.95
MEMORY = 0.97


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """The length and the rates of a training."""

    seconds: float
    seed: int = 7
    peak_rate: float = 2e-3
    tokens_per_step: int = 4096
    talk_steps: float = 0.5
    cooling: float = 0.5


@dataclass(slots=True)
class TrainingProgress:
    """The state of the training; saved and resumed with the weights."""

    step: int = 0
    seen_tokens: int = 0
    length: int = FIRST_LEN
    accuracy: float = 0.0
    since_longer: int = 0

    def record(self, correct: float) -> None:
        """Keeps a running accuracy; doubles the length once the accuracy passes MARK."""
        self.since_longer += 1
        self.accuracy = MEMORY * self.accuracy + (1 - MEMORY) * correct
        if self.accuracy > MARK and self.length < LAST_LEN and self.since_longer > 30:
            self.length, self.accuracy, self.since_longer = self.length * 2, 0.8, 0


def rate_factor(options: TrainingOptions, progress: TrainingProgress, spent: float) -> float:
    """Warm-up by steps, then 1, then down to a hundredth over the last part of the time."""
    left = max(0.0, 1 - spent / options.seconds)
    return min(1.0, (progress.step + 1) / 100, max(left / options.cooling, 0.01))


@dataclass(frozen=True, slots=True)
class Optimisers:
    """Muon for the projections, AdamW for all else, the embedding at a tenth of the rate.

    The embedding's multiplier makes its real steps four times as large. At the full rate words
    change faster than attention can learn to match them.
    """

    parts: tuple[Optimizer, ...]
    rates: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, network: Network, rate: float) -> Optimisers:
        embedding = network.model.embed_tokens.weight
        inner = list(network.model.layers.parameters())
        matrices = [p for p in inner if p.dim() == 2]
        rest = [p for p in inner if p.dim() != 2] + list(network.model.norm.parameters())
        muon = Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        groups = [{"params": rest, "lr": rate}, {"params": [embedding], "lr": rate / 10}]
        adam = AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01)
        return cls((muon, adam), ((rate,), (rate, rate / 10)))

    def step(self, rate_factor: float) -> None:
        """Applies the gradients with all rates scaled by `rate_factor`, and drops them."""
        for part, rates in zip(self.parts, self.rates, strict=True):
            for group, rate in zip(part.param_groups, rates, strict=True):
                group["lr"] = rate * rate_factor
            part.step()
            part.zero_grad(set_to_none=True)


@dataclass(frozen=True, slots=True)
class Trainer:
    """Network, optimisers and tokenizer of one training."""

    network: Network
    forward: Callable[[Tensor], Tensor]
    optimisers: Optimisers
    tokenizer: Tokenizer
    cities: Tensor
    options: TrainingOptions

    def next_batch(self, progress: TrainingProgress) -> tuple[TrainingBatch, bool]:
        """Small talk in short rows, or recall at the present length; True if it is recall."""
        rng = Random(f"{self.options.seed} {progress.step}")
        is_recall = rng.random() >= self.options.talk_steps
        length, share, most = (progress.length, 0.05, 32) if is_recall else (TALK_LEN, 0.9, 16)
        rows = max(1, min(most, self.options.tokens_per_step // length))
        given = training_batch(self.tokenizer, rng, rows=rows, length=length, talk_share=share)
        return given, is_recall

    def learn(self, given: TrainingBatch, rate_factor: float) -> tuple[float, float]:
        """Runs one step; returns the loss, and the share of right cities."""
        hidden = self.forward(given.token_ids[:, :-1])[given.counts]
        head = self.network.model.embed_tokens.weight
        logits = hidden @ head.T / self.network.shape.logits_scaling
        targets = given.token_ids[:, 1:][given.counts]
        loss = functional.cross_entropy(logits, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimisers.step(rate_factor)
        is_city = torch.isin(targets, self.cities)
        correct = (logits.argmax(-1) == targets)[is_city].float().mean()
        return loss.item(), correct.item()


def make_trainer(network: Network, tokenizer: Tokenizer, options: TrainingOptions) -> Trainer:
    """A trainer for a fresh or loaded network; layers are compiled once a length."""
    torch._dynamo.config.recompile_limit = 64
    for layer in network.model.layers:
        layer.compile(dynamic=False)
    cities = [token_id(tokenizer, f"Ġ{city}") for city in words.CITIES]
    optimisers = Optimisers.of(network, options.peak_rate)
    return Trainer(network, network.model, optimisers, tokenizer, torch.tensor(cities), options)


def save_checkpoint(path: Path, trainer: Trainer, progress: TrainingProgress) -> None:
    """Saves all that a later run needs to continue."""
    numbers = {name: getattr(progress, name) for name in TrainingProgress.__slots__}
    state = {
        "tokenizer": trainer.tokenizer.to_str(),
        "network": trainer.network.state_dict(),
        "optimisers": [part.state_dict() for part in trainer.optimisers.parts],
        "progress": numbers,
    }
    torch.save(state, path)


def saved_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a saved training."""
    return Tokenizer.from_str(torch.load(path, weights_only=True)["tokenizer"])


def load_checkpoint(path: Path, trainer: Trainer) -> TrainingProgress:
    """Continues a saved training; the trainer must have that training's tokenizer."""
    state = torch.load(path, weights_only=True)
    trainer.network.load_state_dict(state["network"])
    for part, saved in zip(trainer.optimisers.parts, state["optimisers"], strict=True):
        part.load_state_dict(saved)
    return TrainingProgress(**state["progress"])


def train(trainer: Trainer, progress: TrainingProgress, checkpoint: Path) -> None:
    """Trains for `options.seconds`; logs a line and saves a checkpoint every 20 s."""
    start = time.monotonic()
    logged = start
    while (spent := time.monotonic() - start) < trainer.options.seconds:
        given, is_recall = trainer.next_batch(progress)
        loss, correct = trainer.learn(given, rate_factor(trainer.options, progress, spent))
        progress.step += 1
        progress.seen_tokens += given.counts.numel()
        if is_recall and not math.isnan(correct):  # a batch may lack cities
            progress.record(correct)
        if time.monotonic() - logged > 20:
            logged = time.monotonic()
            save_checkpoint(checkpoint, trainer, progress)
            print(
                f"{spent:6.0f} s  step {progress.step:6d}  tokens {progress.seen_tokens:9d}  "
                f"length {progress.length:5d}  loss {loss:.4f}  cities {progress.accuracy:.3f}",
                flush=True,
            )
    save_checkpoint(checkpoint, trainer, progress)
