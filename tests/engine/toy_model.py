"""A model small enough to be recomputed by hand, whose answer needs every page and the state.

state(p + 1) = state(p) / 2 + token(p)          lives in the recurrent slot
seen(p)      = the sum of the tokens [0, p]     lives in the pages
logit(v)     = cos(0.37 · (v + 1) · (state(p + 1) + seen(p) / 4))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ferryman.cache.manifest import Kind, SectionSpec, StateManifest, lay_out
from ferryman.engine.device import ComputeDevice, HostDevice
from ferryman.engine.memory.copy_stream import Copies
from ferryman.engine.memory.loads import AT_ONCE
from ferryman.engine.memory.slabs import Slabs
from ferryman.engine.runner import Runner
from ferryman.engine.tensor_parallel.group import TpGroup
from ferryman.model.sampling.prompt_logprobs import PrefilledRows
from ferryman.model.shapes.batch import DecodeBatch, PrefillBatch
from ferryman.model.shapes.state import ModelState

PAGE_SIZE = 4
VOCAB = 50


def toy_manifest() -> StateManifest:
    page = (1, PAGE_SIZE, 1)
    full = [SectionSpec(name, 0, page, "float64", 0) for name in ("key", "value")]
    recurrent = [
        SectionSpec("conv", 1, (24, 1), "float64", 0, parts=tuple((part, 8) for part in "xBC")),
        SectionSpec("ssm", 1, (1, 1, 1), "float64", 0),
    ]
    layouts = (lay_out(Kind.FULL, full), lay_out(Kind.RECURRENT, recurrent))
    return StateManifest("toy", PAGE_SIZE, PAGE_SIZE, 0, layouts)


class ToyModel:
    """Counts its forwards."""

    def __init__(self) -> None:
        self.manifest = toy_manifest()
        self.vocab_size = VOCAB
        self.num_forwards = 0

    def prefill(self, batch: PrefillBatch, state: ModelState) -> PrefilledRows:
        self.num_forwards += 1
        rows, tokens, positions = (
            t.tolist() for t in (batch.rows, batch.token_ids, batch.positions)
        )
        heard = torch.empty(len(tokens), dtype=torch.float64, device=batch.token_ids.device)
        for index, (request, token, position) in enumerate(
            zip(rows, tokens, positions, strict=True)
        ):
            table = batch.page_tables[Kind.FULL][request]
            slot = int(batch.working_slots[request])
            heard[index] = _consume(state, table, (slot, slot), position, token)
            for owner, at, dst in batch.snapshots:
                if (owner, at) == (request, position + 1):
                    state.ssm[1][dst] = state.ssm[1][slot]
                    state.conv[1][dst] = state.conv[1][slot]
        return PrefilledRows(heard, _logits)

    def decode(self, batch: DecodeBatch, state: ModelState) -> Tensor:
        self.num_forwards += 1
        heard = [
            _consume(state, batch.page_tables[Kind.FULL][i], slots, position, token)
            for i, (token, position, *slots) in enumerate(
                zip(
                    batch.token_ids.tolist(),
                    batch.positions.tolist(),
                    batch.read_slots.tolist(),
                    batch.write_slots.tolist(),
                    strict=True,
                )
            )
        ]
        return _logits(torch.tensor(heard, dtype=torch.float64, device=batch.token_ids.device))


def _consume(
    state: ModelState, table: Tensor, slots: Sequence[int], position: int, token: int
) -> float:
    assert token >= 0, f"nobody wrote the token at {position}"
    keys = state.attention[0].key_pages
    keys[table[position // PAGE_SIZE], 0, position % PAGE_SIZE, 0] = token
    read, write = slots
    states = state.ssm[1]
    states[write] = states[read] * 0.5 + token
    ssm = states[write]
    places = torch.arange(position + 1, device=table.device)
    seen = keys[table[places // PAGE_SIZE], 0, places % PAGE_SIZE, 0].sum()
    return float(ssm.sum() + seen / 4)


def _logits(heard: Tensor) -> Tensor:
    multiples = torch.arange(1, VOCAB + 1, device=heard.device)
    return torch.cos(0.37 * multiples * heard[:, None])


def toy_logits(tokens: Sequence[int]) -> Tensor:
    """The model's logits after `tokens` [vocab], computed from the tokens alone."""
    state, seen = 0.0, 0.0
    for token in tokens:
        state = state / 2 + token
        seen += token
    return _logits(torch.tensor([state + seen / 4], dtype=torch.float64))[0]


def toy_tokens(tokens: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that follow greedily."""
    said = list(tokens)
    for _ in range(count):
        said.append(int(toy_logits(said).argmax()))
    return said[len(tokens) :]


SIZES: Mapping[Kind, int] = {Kind.FULL: 16, Kind.RECURRENT: 8}
HOST = HostDevice()


def toy_runner(
    device: ComputeDevice = HOST, copies: Copies = AT_ONCE, ranks: TpGroup | None = None
) -> Runner:
    model = ToyModel()
    slabs = Slabs.allocate(model.manifest, SIZES, device.torch_device)
    return Runner(model, slabs, max_rows=4, max_len=64, device=device, copies=copies, ranks=ranks)
