"""The forward of the training equals that of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tools.demo.folder import save_model
from tools.demo.grading import load_network
from tools.demo.network import DemoShape, Network
from tools.demo.scan import scan
from tools.demo.vocabulary import train_tokenizer


def stepwise(x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The recurrence as written, with C = B."""
    rows, tokens, heads, dim = x.shape
    state = torch.zeros(rows, heads, dim, b.shape[-1], dtype=x.dtype)
    seen = []
    for t in range(tokens):
        decay = (dt[:, t] * a).exp()[..., None, None]
        added = (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, None, None]
        state = state * decay + added
        seen.append((state * b[:, t, None, None]).sum(-1))
    return torch.stack(seen, 1)


@pytest.mark.parametrize("piece", [4, 8, 32])
def test_the_scan_in_pieces_is_the_recurrence(piece: int) -> None:
    torch.manual_seed(0)
    x, b = torch.randn(2, 32, 3, 5, dtype=torch.float64), torch.randn(2, 32, 4).double()
    dt, a = torch.rand(2, 32, 3, dtype=torch.float64), -torch.rand(3, dtype=torch.float64) - 0.5
    y = scan(x, dt, a, b, b, piece=piece)
    torch.testing.assert_close(y, stepwise(x, dt, a, b), rtol=1e-12, atol=1e-12)


def test_a_saved_network_loads_in_transformers_with_the_same_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    tokenizer = train_tokenizer()
    network = Network(DemoShape(vocab=tokenizer.get_vocab_size()))
    save_model(network, tokenizer, tmp_path)
    oracle = transformers.GraniteMoeHybridForCausalLM.from_pretrained(tmp_path)
    token_ids = torch.randint(0, tokenizer.get_vocab_size(), (2, 160))
    with torch.inference_mode():
        ours = load_network(tmp_path)(token_ids, torch.ones(2, 160, dtype=torch.bool))
        theirs = oracle(token_ids).logits.flatten(0, 1)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
