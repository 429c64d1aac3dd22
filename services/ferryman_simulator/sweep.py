"""Sweeps: runs the same trace with every combination of some options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from types import MappingProxyType

from ferryman.errors import ConfigError
from ferryman.settings.declaration import size_of
from ferryman_simulator.options import SimulateOptions
from ferryman_simulator.result import Result
from ferryman_simulator.setup import make_setup
from ferryman_simulator.simulation import simulate
from ferryman_simulator.trace import Trace

MAX_RUNS = 256

Value = int | bool
Axis = tuple[str, tuple[Value, ...]]
_Parse = Callable[[str], Value]
_Change = Callable[[SimulateOptions, Value], SimulateOptions]


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One combination, by the names of the varied options, and its result.

    `warnings` name the options that had to be changed.
    """

    varied: Mapping[str, Value]
    result: Result
    warnings: tuple[str, ...] = ()


def parse_axes(texts: Sequence[str]) -> list[Axis]:
    """Parses axes such as `slots=64,128`. Raises ConfigError."""
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


def runs(choices: SimulateOptions, trace: Trace, axes: Sequence[Axis]) -> Iterator[SweepRun]:
    """Every combination, the last axis varying fastest; without axes, one run."""
    names = [name for name, _ in axes]
    for values in product(*(values for _, values in axes)):
        varied = dict(zip(names, values, strict=True))
        changed = choices
        for name, value in varied.items():
            changed = _VARIED[name][1](changed, value)
        setup = make_setup(changed)
        warnings = (*setup.prefill.warnings, *setup.decode.warnings)
        yield SweepRun(varied, simulate(setup, trace), warnings)


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 12:
        raise ConfigError(f"--sweep: {text} is no whole number")
    return int(text)


def _size(text: str) -> int:
    return size_of("--sweep", text)


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise ConfigError(f"--sweep: {text} is neither on nor off")
    return text == "on"


def _in_workers(name: str) -> _Change:
    return lambda choices, value: choices.model_copy(
        update={"workers": choices.workers.model_copy(update={name: value})}
    )


def _in_caches(name: str) -> _Change:
    return lambda choices, value: choices.model_copy(
        update={"caches": choices.caches.model_copy(update={name: value})}
    )


_VARIED: Mapping[str, tuple[_Parse, _Change]] = MappingProxyType(
    {
        "slots": (_count, _in_workers("slots")),
        "grid": (_count, _in_caches("grid")),
        "junctions": (_switch, _in_caches("junctions")),
        "forks": (_switch, _in_caches("forks")),
        "host-memory": (_size, _in_caches("host_memory")),
        "storage-bytes": (_size, _in_caches("storage_bytes")),
    }
)


def _known() -> str:
    return ", ".join(_VARIED)
