"""Flags of a command, from the declaration of the settings that they stand for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_args

import typer
from pydantic import BaseModel

from ferryman.settings.declaration import Leaf, leaves
from ferryman_cli.commands.completions import words
from ferryman_launcher.options import parameter_of

Command = TypeVar("Command", bound=Callable[..., int])


def with_flags(
    kind: type[BaseModel], defaults: Mapping[str, object] = MappingProxyType({})
) -> Callable[[Command], Command]:
    """A command that takes its `**flags` as flags of the settings in `kind`.

    `defaults`, by name, are shown in place of those of the declaration. A command may have several
    kinds. A flag that is not given is None. Values are text as the person wrote it: the
    declaration checks them, with the same errors as for the environment and the file.
    """

    def decorated(command: Command) -> Command:
        parameters = [
            parameter
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        named = {leaf.flag: leaf for leaf in leaves(kind)}
        flags = [_parameter(flag, leaf, defaults) for flag, leaf in named.items()]
        command.__signature__ = inspect.Signature([*flags, *parameters], return_annotation=int)  # type: ignore[attr-defined]
        return command

    return decorated


def _parameter(flag: str, leaf: Leaf, defaults: Mapping[str, object]) -> inspect.Parameter:
    is_switch = leaf.field.annotation is bool
    spelled = f"{flag}/--no-{flag.removeprefix('--')}" if is_switch else flag
    option = typer.Option(
        spelled,
        metavar=None if is_switch else _metavar(leaf),
        help=leaf.meaning.replace("`", ""),
        autocompletion=words(_choices(leaf)) if _choices(leaf) else None,
        show_default=_default(leaf, defaults),
    )
    kind: Any = list[str] if leaf.repeats else bool if is_switch else str
    return inspect.Parameter(
        parameter_of(flag),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def _metavar(leaf: Leaf) -> str:
    kind = leaf.field.annotation
    if leaf.name.endswith(("_bytes", "_memory")):
        return "SIZE"
    if kind is Path or leaf.name.endswith("_dir"):
        return "DIR"
    if choices := _choices(leaf):
        return "|".join(choices)
    return {int: "INTEGER", float: "FLOAT"}.get(kind, "TEXT") if isinstance(kind, type) else "TEXT"


def _choices(leaf: Leaf) -> list[str]:
    """The words that the setting may be; none for one that may be anything."""
    kind = leaf.field.annotation
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return [str(choice) for choice in kind]
    return [word for word in get_args(kind) if isinstance(word, str)]


def _default(leaf: Leaf, defaults: Mapping[str, object]) -> Any:
    """The default as the help shows it; nothing if leaving it out is the default."""
    default = defaults.get(leaf.name, leaf.default)
    return False if default is ... or default == {} or str(default) == "" else str(default)
