"""Sweeps: the same trace through every combination of some choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from types import MappingProxyType

from ferryman.errors import ConfigError
from ferryman_cli.simulate.choices import Choices, make_setup
from ferryman_cli.simulate.pair import simulate
from ferryman_cli.simulate.result import Result
from ferryman_cli.simulate.trace import Trace
from ferryman_cli.sizes import parse_size

MAX_RUNS = 256

Value = int | bool
Axis = tuple[str, tuple[Value, ...]]


@dataclass(frozen=True, slots=True)
class Run:
    """One combination, by the names of what was varied, and what it came to.

    `warnings` say what could not be as it was asked.
    """

    varied: Mapping[str, Value]
    result: Result
    warnings: tuple[str, ...] = ()


def parse_axes(texts: Sequence[str]) -> list[Axis]:
    """`slots=64,128` and its like. Raises ConfigError."""
    axes = [_axis(text) for text in texts]
    names = [name for name, _ in axes]
    if len(set(names)) < len(names):
        raise ConfigError("--sweep names one thing twice")
    num_runs = prod(len(values) for _, values in axes)
    if num_runs > MAX_RUNS:
        raise ConfigError(f"--sweep asks for {num_runs} runs; {MAX_RUNS} are the most")
    return axes


def _axis(text: str) -> Axis:
    name, _, values = text.partition("=")
    if name not in _VARIED or not values:
        raise ConfigError(f"--sweep {text}: it should be NAME=A,B,…; names are {_known()}")
    parse = _VARIED[name][0]
    return name, tuple(dict.fromkeys(parse(value) for value in values.split(",")))


def runs(choices: Choices, trace: Trace, axes: Sequence[Axis]) -> Iterator[Run]:
    """Every combination, the last axis varying fastest; without axes, one run."""
    names = [name for name, _ in axes]
    for values in product(*(values for _, values in axes)):
        varied = dict(zip(names, values, strict=True))
        changed = choices
        for name, value in varied.items():
            changed = _VARIED[name][1](changed, value)
        setup = make_setup(changed)
        warnings = (*setup.prefill.warnings, *setup.decode.warnings)
        yield Run(varied, simulate(setup, trace), warnings)


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 12:
        raise ConfigError(f"--sweep: {text} is no whole number")
    return int(text)


def _size(text: str) -> int:
    return parse_size("--sweep", text)


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise ConfigError(f"--sweep: {text} is neither on nor off")
    return text == "on"


def _with_slots(choices: Choices, value: Value) -> Choices:
    return replace(choices, workers=replace(choices.workers, slots=value))


def _with_grid(choices: Choices, value: Value) -> Choices:
    return replace(choices, caches=replace(choices.caches, grid=value))


def _with_junctions(choices: Choices, value: Value) -> Choices:
    return replace(choices, caches=replace(choices.caches, junctions=bool(value)))


def _with_host_memory(choices: Choices, value: Value) -> Choices:
    return replace(choices, caches=replace(choices.caches, host_memory=value))


def _with_storage_bytes(choices: Choices, value: Value) -> Choices:
    return replace(choices, caches=replace(choices.caches, storage_bytes=value))


_Parse = Callable[[str], Value]
_Change = Callable[[Choices, Value], Choices]

_VARIED: Mapping[str, tuple[_Parse, _Change]] = MappingProxyType(
    {
        "slots": (_count, _with_slots),
        "grid": (_count, _with_grid),
        "junctions": (_switch, _with_junctions),
        "host-memory": (_size, _with_host_memory),
        "storage-bytes": (_size, _with_storage_bytes),
    }
)


def _known() -> str:
    return ", ".join(_VARIED)
