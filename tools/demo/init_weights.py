"""Initial weights from which the model soon learns to look up earlier text.

From plain random weights this model needs thousands of steps until attention finds that the words
of a question also occur in the story. So the initial weights are arranged. Every word's embedding
has a common part, which opens the Mamba gates. Half of a Mamba layer's channels read the last three
words; the other half read the same one word earlier. The next attention's queries look at the first
half as its keys look at the second. So a place attends, weakly, to the word after earlier
occurrences of the same words. All weights are trained further.
"""

from __future__ import annotations

import torch
from tools.demo.network import Attention, DemoLayer, Mamba, Network
from torch import Tensor

COMMON = 0.05
OPEN, GATE_NOISE = 3.0, 0.15
TAP, TAP_NOISE = 0.5, 0.02
SHARPNESS = 1.2
THOUGHT = 0.2


def open_gates(mamba: Mamba, common: Tensor) -> None:
    """Opens the gates for every word, and keeps the common part out of the rest."""
    inner = mamba.shape.ssm_inner
    gate, x = mamba.in_proj.weight[:inner], mamba.in_proj.weight[inner : 2 * inner]
    gate.mul_(GATE_NOISE).add_(common * OPEN / len(common))
    x.sub_((x @ common)[:, None] * common / len(common))


def read_twice(mamba: Mamba) -> None:
    """Half of the channels see words t-2 to t, their twins words t-3 to t-1."""
    inner, half = mamba.shape.ssm_inner, mamba.shape.ssm_inner // 2
    x, taps = mamba.in_proj.weight[inner : 2 * inner], mamba.conv1d.weight[:inner, 0]
    x[half:] = x[:half]
    torch.nn.init.normal_(taps, std=TAP_NOISE)
    taps[:half, 1:] += TAP
    taps[half:, :-1] += TAP


def match(attention: Attention, before: Mamba) -> None:
    """Makes queries for the words just read match keys of the same words read one word earlier."""
    shape, half = attention.shape, before.shape.ssm_inner // 2
    look = torch.randn(shape.kv_heads, attention.head_dim, shape.hidden)
    now, earlier = before.out_proj.weight[:, :half].T, before.out_proj.weight[:, half:].T
    shared = shape.q_heads // shape.kv_heads
    for layer, sight in (
        (attention.q_proj, (look @ now).repeat_interleave(shared, 0)),
        (attention.k_proj, look @ earlier),
    ):
        scale = SHARPNESS * shape.hidden**-0.5 / sight.std()
        layer.weight.copy_((sight * scale).view(-1, shape.hidden))


@torch.no_grad()
def arrange_weights(network: Network) -> None:
    """Arranges the weights of a fresh network."""
    common = torch.randn(network.shape.hidden).sign()
    network.model.embed_tokens.weight.add_(COMMON * common)
    before: Mamba | None = None
    for layer in network.model.layers:
        assert isinstance(layer, DemoLayer)
        mixer = layer.get_submodule(layer.mixer)
        if isinstance(mixer, Mamba):
            open_gates(mixer, common)
            read_twice(mixer)
            before = mixer
        elif isinstance(mixer, Attention) and before is not None:
            match(mixer, before)
        layer.shared_mlp.output_linear.weight.mul_(THOUGHT)
