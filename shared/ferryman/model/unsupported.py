"""The error for an architecture that no family reads: the nearest one, and what differs from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ferryman.errors import ConfigError
from ferryman.model.families import FAMILIES
from ferryman.model.families.refused import REFUSED
from ferryman.model.nearest_family import NearestFamily, nearest_family, stem_and_task
from ferryman.model.shapes.config_fields import ConfigFields

_TASKS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""The ends of the names of models that generate text."""

_MOST_NAMES = 12
"""More names of fields than these are counted, not listed."""


def unsupported(fields: ConfigFields, architectures: Iterable[str]) -> ConfigError:
    """The error that names what was asked for, why it is not served, and the nearest family with a
    published model of it."""
    names = tuple(architectures)
    parts = [f"{fields.source}: architecture {', '.join(names) or '(none)'} is not supported"]
    parts += [f"{name}: {REFUSED[name]}" for name in names if name in REFUSED]
    parts += [_nearest_text(name, fields) for name in names[:1]]
    parts.append(f"`ferryman models` lists the {len(FAMILIES)} families that are")
    return ConfigError("; ".join(filter(None, parts)))


def _nearest_text(name: str, fields: ConfigFields) -> str:
    """The nearest supported model, and what is not understood beside it."""
    nearest = nearest_family(fields, name)
    if nearest is None:
        return "no supported one has a similar name or similar fields"
    stem, task = stem_and_task(name)
    architecture, published = nearest.architecture, nearest.published
    if task not in _TASKS and stem_and_task(architecture)[0] == stem:
        return f"only models that generate text are, as {architecture}; {task} is another task"
    text = (
        f"the nearest one is {published.model}, {architecture} ({published.family.summary}), "
        f"{_unknown_text(nearest)}"
    )
    return text if name in REFUSED else f"{text}; {_difference(nearest)}"


def _unknown_text(nearest: NearestFamily) -> str:
    """The fields that its family does not know, and those that it misses."""
    if len(nearest.text.raw) == 1:
        return "by its name: config.json has no other field"
    missing = f"; missing are {_listed(nearest.missing)}" if nearest.missing else ""
    if not nearest.unknown:
        return f"whose family knows all fields{missing}"
    return f"and not understood are the fields {_listed(nearest.unknown)}{missing}"


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _difference(nearest: NearestFamily) -> str:
    """A mistake of the config if it were that family's: the part that is not understood."""
    try:
        nearest.published.family.read(nearest.text)
    except ConfigError as error:
        reason = str(error).removeprefix(f"{nearest.text.source}: ")
        return f"read as such it would be refused: {reason}"
    return "the fields read as such, but nobody has compared what its layers compute"
