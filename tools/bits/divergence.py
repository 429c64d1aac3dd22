"""The first kernel at which a way parts from the cold run, found position by position.

At the first position where anything differs, all earlier positions are equal in every part, and so
is the state that they left, as far as any output has shown it. There the first call in the cold
run's order whose outputs differ has equal inputs, or what differs lies between two recorded calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tools.bits.layer_record import LayerRecorder, recorder
from tools.bits.layer_ways import (
    LAYER_WAYS,
    TracedPrompt,
    TracedRun,
    cold,
    next_turn,
)
from tools.bits.measured_engine import DTYPES
from tools.bits.models import PAGE_SIZE, BitsModel, Prompt
from tools.bits.trace import WHOLE, Trace, TraceEvent
from torch import Tensor

from ferryman.model.layers.decoder import Model
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model

NEXT_TURN = "turn-2"
POINTED = (*LAYER_WAYS, NEXT_TURN)
"""The ways that can be driven layer by layer."""

PARTS: Mapping[str, str] = {
    "qkv": "q/k/v projection",
    "out": "output projection",
    "project_in": "input projection",
    "project_out": "output projection",
    "gate_up": "gate and up projection",
    "down": "down projection",
    "head": "head",
    "router": "router",
    "experts": "experts",
    "routed": "experts",
    "gate": "gate",
}
"""Plain names of parts, by the last word of their place."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first call with different outputs: `event` of the cold run, `twin` of the other way.

    `after` is the call before it, whose outputs are equal; `differing_inputs` are the arguments
    that differ already.
    """

    position: int
    event: TraceEvent
    twin: TraceEvent
    after: str
    differing_inputs: tuple[str, ...]

    @property
    def kernels(self) -> str:
        names = dict.fromkeys((self.event.function, self.twin.function))
        inner = (self.event.within - self.twin.within, self.twin.within - self.event.within)
        if not any(inner):
            return " against ".join(names)
        shown = (", ".join(sorted(functions)) or "nothing else" for functions in inner)
        return f"{' against '.join(names)} ({' against '.join(shown)})"

    @property
    def part(self) -> str:
        return part_name(self.event)

    def text(self) -> str:
        lines = [
            f"position {self.position}: {self.event.key.place or 'decoder'}, {self.part}",
            f"kernel: {self.kernels}",
            *(size_text(*pair) for pair in _differing(self.event, self.twin)),
        ]
        if self.differing_inputs:
            arguments = ", ".join(self.differing_inputs)
            lines.append(f"its inputs differ already ({arguments}), after equal {self.after}")
        else:
            lines.append(f"its inputs are equal; before it: {self.after}")
        return "\n".join(lines)


def part_name(event: TraceEvent) -> str:
    """Plain words for the work of a call."""
    if event.key.role not in (WHOLE, "product"):
        return event.key.role
    last = event.key.place.rsplit(".", 1)[-1]
    return PARTS.get(last, last)


def first_divergence(expected: Trace, found: Trace) -> Divergence | None:
    """Calls that one of the two ways has alone are passed over."""
    for position in sorted(expected.keys() & found.keys()):
        twins = {event.key: event for event in found[position]}
        after = "the beginning"
        for event in expected[position]:
            twin = twins.get(event.key)
            if twin is None or not event.outputs or not twin.outputs:
                continue
            if _differing(event, twin):
                inputs = _differing_inputs(event, twin)
                return Divergence(position, event, twin, after, inputs)
            after = f"{event.function} at {event.key.place or 'decoder'}"
    return None


def _differing(event: TraceEvent, twin: TraceEvent) -> list[tuple[Tensor, Tensor]]:
    """The outputs that both have, and whose bits differ."""
    pairs = zip(event.outputs, twin.outputs, strict=False)
    return [
        (one, other)
        for one, other in pairs
        if one.shape == other.shape and one.dtype is other.dtype and not same_bits(one, other)
    ]


def _differing_inputs(event: TraceEvent, twin: TraceEvent) -> tuple[str, ...]:
    """None if prefill and decode have different kernels, with other arguments."""
    if event.function != twin.function:
        return ()
    common = event.inputs.keys() & twin.inputs.keys()
    return tuple(sorted(name for name in common if event.inputs[name] != twin.inputs[name]))


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def size_text(one: Tensor, other: Tensor) -> str:
    """The number of values that differ, and by how much."""
    num_different = int((one != other).sum())
    gap = (one.double() - other.double()).abs().max()
    return (
        f"{num_different} of {one.numel()} values of {str(one.dtype).removeprefix('torch.')} "
        f"differ, by at most {gap:.2g} (the largest is {one.double().abs().max():.2g})"
    )


@torch.inference_mode()
def pointed(model: BitsModel, dtype: str, way: str, num_tokens: int) -> str:
    """The text that names the first divergence among the model's prompts. Sets torch's threads to
    one, as the cold run has."""
    if model.served.adapter:
        return "rows with an adapter are not driven layer by layer"
    torch.set_num_threads(1)
    options = DTYPES[dtype]
    with recorder() as (layers, stack):
        loaded = load_model(
            model.folder,
            LoadOptions(
                options["dtype"],
                page_size=PAGE_SIZE,
                quantize=options.get("quantize", "none"),
                kv_dtype=model.served.options.get("kv_dtype", "auto"),
            ),
        )
        layers.watch(loaded, stack)
        for number, prompt in enumerate(model.prompts):
            turn = model.turns[0] if way == NEXT_TURN else ()
            divergence = _of_prompt(loaded, layers, way, prompt, turn, num_tokens)
            if divergence is not None:
                return f"prompt {number} of {len(prompt)} tokens, {divergence.text()}"
    return f"all of {len(model.prompts)} prompts are equal in every part"


def _of_prompt(
    loaded: Model,
    layers: LayerRecorder,
    way: str,
    prompt: Prompt,
    turn: Prompt,
    num_tokens: int,
) -> Divergence | None:
    """With a `turn` the prompt's answer and the turn belong to the prompt that is compared."""

    def cold_run(asked: Prompt) -> TracedPrompt:
        return TracedPrompt(asked, cold(TracedRun(loaded, layers), asked, num_tokens))

    first = cold_run(prompt)
    if turn:
        layers.take()
        asked = cold_run((*first.prompt, *first.answer, *turn))
        expected = layers.take()
        next_turn(first, TracedRun(loaded, layers), asked)
    else:
        asked, expected = first, layers.take()
        LAYER_WAYS[way](TracedRun(loaded, layers), asked)
    return first_divergence(expected, layers.take())
