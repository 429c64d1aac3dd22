"""Where training begins: weights at which reading what was said before is a small step away.

From plain random weights this model needs thousands of steps before attention finds that a
question's words stood in the story too. So the beginning is arranged: every word's embedding has
a common part, with which the Mamba gates are open; half of a Mamba layer's channels read the last
three words, the other half the same things one word earlier; and the next attention's queries
look at the first half as its keys look at the second. A place then attends to what followed the
same words, weakly. All that is trained further like any other weight.
"""

from __future__ import annotations

import torch
from tools.demo.network import Attention, Layer, Mamba, Network
from torch import Tensor

COMMON = 0.05
OPEN, GATE_NOISE = 3.0, 0.15
TAP, TAP_NOISE = 0.5, 0.02
SHARPNESS = 1.2
THOUGHT = 0.2


def open_gates(mamba: Mamba, common: Tensor) -> None:
    """Let the gates be open for every word, and keep the common part out of the rest."""
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
    """Queries of what was just read look for keys of the same, read one word earlier."""
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
def prepare(network: Network) -> None:
    """Arrange a fresh network's weights."""
    common = torch.randn(network.shape.hidden).sign()
    network.model.embed_tokens.weight.add_(COMMON * common)
    before: Mamba | None = None
    for layer in network.model.layers:
        assert isinstance(layer, Layer)
        mixer = layer.get_submodule(layer.mixer)
        if isinstance(mixer, Mamba):
            open_gates(mixer, common)
            read_twice(mixer)
            before = mixer
        elif isinstance(mixer, Attention) and before is not None:
            match(mixer, before)
        layer.shared_mlp.output_linear.weight.mul_(THOUGHT)
