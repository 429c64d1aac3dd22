"""LongCat-Flash: identities among the experts by their formula, and its published tensors."""

from __future__ import annotations

import random
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model.comparison import random_config
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.paged_run import PagedRun, Part
from tests.model.ragged import random_prompt
from tests.tiny_models import save_random
from torch import Tensor

from ferryman.model.layers.expert_router import shares_by_biased_measure
from ferryman.model.layers.experts import ExpertMatrices, ShareOfOutput, load_experts_for
from ferryman.model.layers.mlp import gated_by
from ferryman.model.layers.moe import MixtureOfExperts
from ferryman.model.layers.shortcut_experts import ExpertsAndIdentities
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.shapes.ranks import SINGLE_RANK
from ferryman.model.weights.linear import make_linear
from ferryman.model.weights.matrix import PlainMatrix
from ferryman_kernels.elementwise.activations import silu

EXPERTS, IDENTITIES, CHOSEN, HIDDEN, INNER, SCALING = 5, 4, 3, 24, 16, 2.5
CPU = torch.device("cpu")
DRAWN = torch.Generator().manual_seed(11)
SCORES = torch.randn(EXPERTS + IDENTITIES, HIDDEN, generator=DRAWN, dtype=torch.float64)
BIAS = torch.randn(EXPERTS + IDENTITIES, generator=DRAWN, dtype=torch.float64) / 30
GATE_UPS = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=DRAWN, dtype=torch.float64) / 5
DOWNS = torch.randn(EXPERTS, HIDDEN, INNER, generator=DRAWN, dtype=torch.float64) / 5
HIDDEN_STATES = torch.randn(300, HIDDEN, generator=DRAWN, dtype=torch.float64)


def mixture(dtype: torch.dtype) -> ExpertsAndIdentities:
    score = make_linear(SCORES.to(torch.float64 if dtype is torch.float64 else torch.float32))
    router = shares_by_biased_measure(
        score, BIAS.to(torch.float64 if dtype is torch.float64 else torch.float32), CHOSEN, SCALING
    )
    parts = [
        ExpertMatrices([PlainMatrix(first, dtype, CPU)], PlainMatrix(down, dtype, CPU))
        for first, down in zip(GATE_UPS, DOWNS, strict=True)
    ]
    experts = load_experts_for(CPU, parts, gated_by(silu), ShareOfOutput())
    return ExpertsAndIdentities(router, MixtureOfExperts(router, experts, SINGLE_RANK), EXPERTS)


def naive(x: Tensor) -> tuple[Tensor, int]:
    """The output of one token [hidden_dim], and the number of its identities."""
    shares = (SCORES @ x).softmax(0)
    chosen = sorted(range(len(BIAS)), key=lambda e: float(shares[e] + BIAS[e]))[-CHOSEN:]
    total = torch.zeros_like(x)
    for expert in chosen:
        yielded = x
        if expert < EXPERTS:
            gate, up = (GATE_UPS[expert] @ x).chunk(2)
            yielded = DOWNS[expert] @ (torch.nn.functional.silu(gate) * up)
        total += SCALING * shares[expert] * yielded
    return total, sum(expert >= EXPERTS for expert in chosen)


def test_identities_yield_their_input_times_their_shares() -> None:
    outputs = mixture(torch.float64)(HIDDEN_STATES)
    counts = set()
    for x, y in zip(HIDDEN_STATES, outputs, strict=True):
        expected, identities = naive(x)
        counts.add(identities)
        assert (y - expected).abs().max() < 1e-12
    assert counts == set(range(CHOSEN + 1)), "with none, some, and identities alone"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_its_bits_among_any_others(dtype: torch.dtype) -> None:
    experts, hidden = mixture(dtype), HIDDEN_STATES.to(dtype)
    together = experts(hidden)
    for row in range(0, len(hidden), 7):
        assert torch.equal(experts(hidden[row : row + 1]), together[row : row + 1])
        assert torch.equal(experts(hidden[row:]), together[row:])


def test_a_checkpoint_without_tensors_of_identities_is_read(tmp_path: Path) -> None:
    """As published; transformers writes products of identities too, and never multiplies by
    them."""
    seed = next(n for n in count() if random_config("longcat_flash", n).zero_expert_num)
    config = random_config("longcat_flash", seed)
    save_random(tmp_path, config, seed)
    expected, path = logits(tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(path)
    kept = {name: t for name, t in tensors.items() if _expert_of(name) < config.n_routed_experts}
    assert len(kept) < len(tensors)
    save_file(kept, path, {"format": "pt"})
    assert torch.equal(logits(tmp_path), expected)


def _expert_of(name: str) -> int:
    _, _, behind = name.partition(".experts.")
    return int(behind.partition(".")[0]) if behind else -1


def logits(folder: Path) -> Tensor:
    run = PagedRun(load_model(folder, LoadOptions("float32", page_size=16)), 1)
    prompt = random_prompt(random.Random(1), 40, VOCAB_SIZE)
    (found,) = run.prefill([Part(run.start(), prompt)])
    return found
