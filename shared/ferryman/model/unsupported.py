"""The error for an architecture that no family reads: the nearest one, and what differs from it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from ferryman.errors import ConfigError
from ferryman.model.families import FAMILIES, Family
from ferryman.model.families.refused import REFUSED
from ferryman.model.shapes.config_fields import ConfigFields

_TASKS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""The ends of the names of models that generate text."""

_LEAST_LIKENESS = 0.65


def unsupported(fields: ConfigFields, architectures: Iterable[str]) -> ConfigError:
    """The error that names what was asked for, why it is not served, and the nearest family."""
    names = tuple(architectures)
    parts = [f"{fields.source}: architecture {', '.join(names) or '(none)'} is not supported"]
    parts += [f"{name}: {REFUSED[name]}" for name in names if name in REFUSED]
    parts += [_nearest_text(name, fields) for name in names[:1] if name not in REFUSED]
    parts.append(f"`ferryman models` lists the {len(FAMILIES)} families that are")
    return ConfigError("; ".join(filter(None, parts)))


def _nearest_text(name: str, fields: ConfigFields) -> str:
    """The nearest supported architecture, and what its family would refuse in these fields."""
    stem, task = _stem_and_task(name)
    nearest = _nearest(stem)
    if nearest is None:
        return "no supported one has a similar name"
    architecture, family = nearest
    if task not in _TASKS and _stem_and_task(architecture)[0] == stem:
        return f"only models that generate text are, as {architecture}; {task} is another task"
    return (
        f"the nearest one is {architecture} ({family.summary}), and {_difference(family, fields)}"
    )


def _nearest(stem: str) -> tuple[str, Family[Any]] | None:
    stems = {
        _stem_and_task(architecture)[0].lower(): (architecture, family)
        for family in reversed(FAMILIES)
        for architecture in reversed(family.architectures)
    }
    near = difflib.get_close_matches(stem.lower(), stems, n=1, cutoff=_LEAST_LIKENESS)
    return stems[near[0]] if near else None


def _difference(family: Family[Any], fields: ConfigFields) -> str:
    """A mistake of the config if it were that family's: the part that is not understood."""
    try:
        family.read(fields)
    except ConfigError as error:
        return f"read as such it would be refused: {str(error).removeprefix(f'{fields.source}: ')}"
    return "the fields read as such, but nobody has compared what its layers compute"


def _stem_and_task(architecture: str) -> tuple[str, str]:
    """`LlamaForCausalLM` is `Llama` and `ForCausalLM`."""
    for task in ("LMHeadModel", "Model"):
        if architecture.endswith(task) and "For" not in architecture:
            return architecture.removesuffix(task), task
    stem, preposition, task = architecture.partition("For")
    return stem, preposition + task
