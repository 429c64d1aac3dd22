"""The place of a value in a body, and the fields of the body that are passed over.

A name that no reader knows is not refused: the answer says that it had no effect. All places of one
body share one list of such names. A router with `--strict-fields` refuses them instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ferryman.errors import InvalidRequest
from ferryman.settings.declaration import nearest, suggestion

MAX_SHOWN_CHARS = 80
MAX_PLACE_CHARS = 200
# Different names of one body that are noted. A conversation may have thousands of unknown fields,
# and the nearest known name takes a millisecond to find.
MAX_IGNORED = 16
_INDEX = re.compile(r"\[\d+\]")
_UNSHOWN = re.compile(r"[^ -+\--~]")  # no printable ASCII, or the comma between names


@dataclass(frozen=True, slots=True)
class IgnoredField:
    """A field that had no effect: its place, and what the sender may have meant, or why."""

    name: str
    remark: str = ""

    @property
    def shown(self) -> str:
        return f"{self.name} ({self.remark})" if self.remark else self.name

    @property
    def plain(self) -> str:
        """The name in printable ASCII, for headers and terminals."""
        return _UNSHOWN.sub("?", self.name)

    @property
    def label(self) -> str:
        """The name without indices: the same field of any message or tool."""
        return _INDEX.sub("[]", self.name)


class BodyRules(NamedTuple):
    """The operator's choices for bodies. If `is_strict`, a field that is not known is refused; if
    `is_verbatim`, a line that means nothing to a model stays in the prompt."""

    is_strict: bool = False
    is_verbatim: bool = False


AS_USUAL = BodyRules()


class IgnoredFields:
    """The fields of one body that are passed over, each name once however often it occurs."""

    def __init__(self, rules: BodyRules) -> None:
        self.rules = rules
        self._fields: dict[str, IgnoredField] = {}

    @property
    def listed(self) -> tuple[IgnoredField, ...]:
        return tuple(self._fields.values())

    def is_new(self, name: str) -> bool:
        """Whether a field is worth a note: the first of its name, and not one too many."""
        label = IgnoredField(name).label
        return len(self._fields) < MAX_IGNORED and label not in self._fields

    def add(self, ignored: IgnoredField) -> None:
        self._fields[ignored.label] = ignored


class BodyPlace(str):
    """The name of a value in a body, as errors show it: `tools[0].name`; empty for the body."""

    __slots__ = ("ignored",)
    ignored: IgnoredFields

    def __new__(cls, name: str, ignored: IgnoredFields) -> BodyPlace:
        place = super().__new__(cls, name)
        place.ignored = ignored
        return place

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """A copy, in an error that travels, is the name alone."""
        return str, (str(self),)

    @classmethod
    def of_body(cls, rules: BodyRules = AS_USUAL) -> BodyPlace:
        """The place of a whole body that is about to be read."""
        return cls("", IgnoredFields(rules))

    def field(self, name: str) -> BodyPlace:
        """The place of a field of this object."""
        return BodyPlace(f"{self}.{name}" if self else name, self.ignored)

    def item(self, index: int) -> BodyPlace:
        """The place of an item of this list."""
        return BodyPlace(f"{self}[{index}]", self.ignored)

    def pass_over(self, name: str, names: Iterable[str]) -> None:
        """Notes a field of this object that is none of those `names`. Raises InvalidRequest
        where bodies are read strictly."""
        short = name[:MAX_SHOWN_CHARS]
        full_name = str(self.field(short))
        if self.ignored.rules.is_strict:
            near = suggestion(short, names)
            raise InvalidRequest(f"{full_name} is no known field{near}", full_name)
        if self.ignored.is_new(full_name):
            near = nearest(short, names)
            remark = f"did you mean {near}?" if near else ""
            self.ignored.add(IgnoredField(full_name, remark))

    def note(self, why: str) -> None:
        """Notes that the value here has no effect. It may be there, also where bodies are read
        strictly: no name in it is unknown."""
        self._note(self[:MAX_PLACE_CHARS], why)

    def leave_out(self, kind: str, why: str) -> None:
        """Notes that the object here, of this type, has no effect. Raises InvalidRequest where
        bodies are read strictly."""
        if self.ignored.rules.is_strict:
            raise InvalidRequest(f"{self} is not offered: {why}", self.field("type"))
        self._note(f"{self} of type {kind}", why)

    def leave_out_line(self, name: str, why: str) -> None:
        """Notes that a line of the text here is no part of the prompt."""
        self._note(f"{self} line {name}", why)

    def _note(self, full_name: str, why: str) -> None:
        if self.ignored.is_new(full_name):
            self.ignored.add(IgnoredField(full_name, why))
