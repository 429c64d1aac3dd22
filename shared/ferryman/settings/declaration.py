"""Declarations of settings: the types of values, and a setting's name from outside.

A setting is a field of a frozen pydantic model; the string below it is its meaning. Models
nest, but from outside every setting has one flat name, the same for every process that has it:

    class DecodeSettings(BaseModel):
        bus: Annotated[BusSettings, Called(url="nats_url")] = BusSettings()    # FERRYMAN_NATS_URL
        max_reserved: Count = 8                                            # FERRYMAN_MAX_RESERVED
        linger_seconds: Fixed[Seconds] = 0.75        # set by code and tests, and not from outside
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ferryman.errors import ConfigError

T = TypeVar("T")

GROUP = ConfigDict(
    frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
)
_FIXED = "not set from outside"
_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_NAME = re.compile(r"^[a-z0-9-]{1,32}$")
_HOST_NAME = re.compile(r"^(?=.{1,253}$)[a-z0-9-]{1,63}(\.[a-z0-9-]{1,63})*$")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)


def parse_size(text: object) -> object:
    """Bytes of a size as people write it, `512M` or `2GiB`; a value that is no text stays as it is.

    Raises ValueError for a text that is no size.
    """
    if not isinstance(text, str):
        return text
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("it should be a size such as 512M, 2G or 1048576")
    return int(float(match[1]) * _FACTORS[match[2].upper()])


def size_of(flag: str, text: str) -> int:
    """The bytes of a flag; an empty text is 0. Raises ConfigError for a text that is no size."""
    try:
        return int(str(parse_size(text))) if text else 0
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: {error}") from None


def size_text(num_bytes: int) -> str:
    """The text that `parse_size` reads, with at most one digit after the point."""
    for letter in ("T", "G", "M", "K"):
        if num_bytes >= _FACTORS[letter]:
            return f"{num_bytes / _FACTORS[letter]:.1f}".removesuffix(".0") + letter
    return str(num_bytes)


def shorten_host_name(text: object) -> object:
    """A host's full name, as clouds give nodes, as a name of 32 characters without dots.

    A name that is short already, or no host's, stays as it is. Two hosts keep two names: the end is
    a hash of the whole.
    """
    if not isinstance(text, str) or _NAME.match(text) or not _HOST_NAME.match(text):
        return text
    digest = hashlib.blake2s(text.encode(), digest_size=4).hexdigest()
    return f"{text[:23].replace('.', '-').rstrip('-')}-{digest}"


Fixed = Annotated[T, _FIXED]
Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, BeforeValidator(parse_size)]
Share = Annotated[float, Field(gt=0, le=1)]
Name = Annotated[str, Field(pattern=_NAME.pattern)]
NodeName = Annotated[Name, BeforeValidator(shorten_host_name)]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
WritePolicyName = Literal["write_through", "write_through_selective", "write_back"]
PrefetchPolicyName = Literal["best_effort", "wait_complete", "timeout"]
# Tokens; a smaller prefetch costs more than it saves.
PrefetchThreshold = Annotated[int, Field(ge=0)]
PREFETCH_THRESHOLD = 64


class Called:
    """The name of a field from outside, or of a group's members, if it is not their own.

    One name may stand for several fields: then it sets all of them. A field may be a setting of one
    `role` of a cluster, and have a `flag` that is not its name. A flag that `repeats` may be given
    several times: its values are joined with commas.
    """

    def __init__(
        self,
        name: str = "",
        *,
        role: str = "",
        flag: str = "",
        repeats: bool = False,
        **members: str,
    ) -> None:
        self.name, self.role, self.flag, self.members = name, role, flag, members
        self.repeats = repeats


@dataclass(frozen=True, slots=True)
class Leaf:
    """One setting of a model: its name from outside, where it is, and its default.

    `default` is `...` if there is none. `role` is the role of the processes that get the
    setting; empty: all that have the model.
    """

    name: str
    role: str
    flag: str
    path: tuple[str, ...]
    field: FieldInfo
    default: Any
    meaning: str
    repeats: bool = False


def leaves(kind: type[BaseModel]) -> Iterator[Leaf]:
    """All settings of a model, in the order of their declaration."""
    yield from _leaves(kind, (), {}, None, "")


def _leaves(
    kind: type[BaseModel],
    path: tuple[str, ...],
    names: Mapping[str, str],
    group: BaseModel | None,
    heading: str,
) -> Iterator[Leaf]:
    for name, field in kind.model_fields.items():
        if _FIXED in field.metadata:
            continue
        default = getattr(group, name) if group is not None else _default(field)
        meaning = " ".join((field.description or "").split())
        called = next((mark for mark in field.metadata if isinstance(mark, Called)), Called())
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            of_group = default if isinstance(default, BaseModel) else None
            yield from _leaves(inner, (*path, name), called.members, of_group, meaning)
            continue
        if heading:
            meaning = f"{heading.removesuffix('.')}: {meaning}"
        outside = called.name or names.get(name, name)
        flag = called.flag or "--" + outside.replace("_", "-")
        place = (*path, name)
        yield Leaf(outside, called.role, flag, place, field, default, meaning, called.repeats)


def _default(field: FieldInfo) -> Any:
    return ... if field.is_required() else field.get_default(call_default_factory=True)


def nearest(name: str, names: Iterable[str]) -> str:
    """The most similar of these names; empty when none is."""
    near = difflib.get_close_matches(name, sorted(names), n=1)
    return near[0] if near else ""


def suggestion(name: str, names: Iterable[str]) -> str:
    """`; did you mean …?`, if one of the names is similar."""
    near = nearest(name, names)
    return f"; did you mean {near}?" if near else ""


def reason_of(error: ErrorDetails) -> str:
    """The reason why a value is refused, in the words of its declaration or of pydantic."""
    if error["type"] == "literal_error":
        choices = error["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
        return f"it should be one of {choices}"
    return error["msg"].removeprefix("Value error, ").removeprefix("Input ")
