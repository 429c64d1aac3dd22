"""The kinds of values in a JSON body: how each is checked, and its JSON Schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ferryman.errors import InvalidRequest
from ferryman_router.bodies.place import BodyPlace
from ferryman_router.bodies.unread_fields import is_left_out

Check = Callable[[Any, BodyPlace], Any]
Shape = Mapping[str, Any]
Values = dict[str, Any]

MAX_INT = 2**31 - 1


def as_is(value: Any, name: str) -> Any:
    """Passes on a value that its owner checks."""
    return value


@dataclass(frozen=True, slots=True)
class FieldKind:
    """A kind of value. `check` takes a value and its place, and returns what readers get; it raises
    InvalidRequest. `default` stands for a value that is absent or null, unless `missing` does: that
    is checked like a given one."""

    schema: Shape
    check: Check = as_is
    default: Any = None
    example: Any = None
    missing: Any = None

    def at_most(self, most: int) -> FieldKind:
        """The same kind of list with another bound."""
        return replace(self, schema={**self.schema, "maxItems": most})

    def unchecked(self) -> FieldKind:
        """The same kind for a value that its owner checks, in words of its own."""
        return replace(self, check=as_is)


def whole(low: int, high: int, default: int | None = None) -> FieldKind:
    """A whole number in a range."""

    def check(value: Any, name: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise InvalidRequest(f"{name} must be a whole number from {low} to {high}", name)
        return value

    return FieldKind({"type": "integer", "minimum": low, "maximum": high}, check, default)


def real(low: float, high: float, default: float, *, above: bool = False) -> FieldKind:
    """A number from `low`, or `above` it, to `high`; its owner checks it."""
    least = "exclusiveMinimum" if above else "minimum"
    return FieldKind({"type": "number", least: low, "maximum": high}, default=default)


def either(*types: str, default: Any = None) -> FieldKind:
    """A value of one of several types, which its reader checks."""
    return FieldKind({"type": list(types)}, default=default)


def choice(*allowed: str, default: str | None = None, missing: str | None = None) -> FieldKind:
    """One of some texts."""

    def check(value: Any, name: str) -> str:
        if value not in allowed:
            text(value, name)
            raise InvalidRequest(f"{name} must be one of {', '.join(allowed)}", name)
        return str(value)

    schema = {"type": "string", "enum": list(allowed)}
    return FieldKind(schema, check, default, missing=missing)


def only(allowed: object, shape: Shape, why: str) -> FieldKind:
    """A feature that is not offered: refused with the reason, unless it is left off."""

    def check(value: Any, name: str) -> Any:
        if value != allowed:
            raise InvalidRequest(f"{name} is not offered: {why}", name)
        return value

    return FieldKind(shape, check, None, allowed)


def _instance(of: type, what: str) -> Callable[[Any, str], Any]:
    def check(value: Any, name: str) -> Any:
        if not isinstance(value, of):
            raise InvalidRequest(f"{name} must be {what}", name)
        return value

    return check


flag, text = _instance(bool, "true or false"), _instance(str, "a string")
items, mapping = _instance(list, "a list"), _instance(dict, "an object")


def present(value: Any, name: str) -> Values:
    """The fields of an object that are not null."""
    return {field: part for field, part in mapping(value, name).items() if part is not None}


ANY = FieldKind({})
FLAG = FieldKind({"type": "boolean"}, flag, False, False)
YES = replace(FLAG, default=True)
TEXT = FieldKind({"type": "string"}, text, "", "a")
OBJECT = FieldKind({"type": "object"}, mapping, {})
SOME_OBJECT = FieldKind({"type": "object"}, present)
LIST = FieldKind({"type": "array"}, items, ())


def list_of(item: Shape, most: int, check: Check = items) -> FieldKind:
    """A list; its reader checks the items."""
    return FieldKind({"type": "array", "items": item, "maxItems": most}, check, ())


class Record:
    """An object of named fields. Its reader gets all of them, with defaults for those that are
    absent; null is the same as absent, as in OpenAI's own interface.

    A field that is not read is passed over, and noted as such. `refused` has the reason of each
    field that is known and not offered.
    """

    def __init__(
        self, kinds: Mapping[str, FieldKind], refused: Mapping[str, str] | None = None
    ) -> None:
        self._refused = refused or {}
        self._checks = {name: kind.check for name, kind in kinds.items()}
        self._defaults = {name: kind.default for name, kind in kinds.items()}
        self._missing = {n: kind.missing for n, kind in kinds.items() if kind.missing is not None}

    @property
    def kind(self) -> FieldKind:
        """A field that is such an object."""
        return FieldKind({"type": "object"}, self.read, self._defaults)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._checks)

    def read(self, value: Any, place: BodyPlace) -> Values:
        """The fields of the object at a place. Raises InvalidRequest, naming the field."""
        fields: Values = mapping(value, place)
        if not fields.keys() <= self._checks.keys():
            self._check_names(fields, place)
        values = self._defaults.copy()
        for name, item in fields.items():
            if item is not None and (check := self._checks.get(name)) is not None:
                # A conversation has thousands of texts that need no name.
                values[name] = item if check is as_is else check(item, place.field(name))
        for name, missing in self._missing.items():
            if fields.get(name) is None:
                values[name] = self._checks[name](missing, place.field(name))
        return values

    def _check_names(self, fields: Values, place: BodyPlace) -> None:
        """A field that is not offered may say that it is not wanted."""
        for name, value in fields.items():
            if name in self._checks or (name in self._refused and is_left_out(name, value)):
                continue
            if name in self._refused:
                full_name = place.field(name)
                message = f"{full_name} is not offered: {self._refused[name]}"
                raise InvalidRequest(message, full_name)
            # Null is the same as absent, whatever the name.
            if value is not None:
                place.pass_over(name, self._checks)


def record(names: str = "", **kinds: FieldKind) -> Record:
    """A record of `kinds`, and of `names` whose values are passed on as they are."""
    return Record(dict.fromkeys(names.split(), ANY) | kinds)


def required(values: Mapping[str, Any], name: str, path: str) -> str:
    """A text of a record that may not be absent or empty."""
    value = "" if values[name] is None else text(values[name], f"{path}.{name}")
    if not value:
        raise InvalidRequest(f"{path}.{name} is missing", f"{path}.{name}")
    return str(value)
