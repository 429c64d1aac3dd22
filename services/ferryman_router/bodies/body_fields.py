"""The fields of a JSON object, each read once and checked for its kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from ferryman.errors import InvalidRequest
from ferryman.settings.declaration import suggestion
from ferryman_router.bodies.api_fields import AS_LEFT_OUT

T = TypeVar("T")

MAX_SHOWN_CHARS = 80


class BodyFields:
    """The fields of one object; null is the same as absent, as in OpenAI's own interface."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values, self._path = values, path

    def name(self, field: str) -> str:
        return f"{self._path}.{field}" if self._path else field

    @property
    def all(self) -> Mapping[str, Any]:
        """As they are, for a reader of several of them."""
        return self._values

    def has(self, field: str) -> bool:
        return self._values.get(field) is not None

    def value(self, field: str, default: Any = None) -> Any:
        """As it is, for what is checked elsewhere."""
        found = self._values.get(field)
        return default if found is None else found

    def flag(self, field: str, *, default: bool = False) -> bool:
        return self._of(bool, field, default, "true or false")

    def text(self, field: str, default: str = "") -> str:
        return self._of(str, field, default, "a string")

    def items(self, field: str) -> list[Any]:
        return self._of(list, field, [], "a list")

    def inner(self, field: str) -> BodyFields:
        return BodyFields(self._of(dict, field, {}, "an object"), self.name(field))

    def whole(self, field: str, default: int, *, low: int, high: int) -> int:
        value = self.value(field, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            message = f"{self.name(field)} must be a whole number from {low} to {high}"
            raise InvalidRequest(message, self.name(field))
        return value

    def _of(self, kind: type[T], field: str, default: T, what: str) -> T:
        value = self.value(field, default)
        if not isinstance(value, kind):
            raise InvalidRequest(f"{self.name(field)} must be {what}", self.name(field))
        return value

    def items_by_name(self) -> Mapping[str, Any]:
        """All fields as they are, for what is checked elsewhere."""
        return self._values

    def real(self, field: str, default: float) -> float:
        value = self.value(field, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise InvalidRequest(f"{self.name(field)} must be a number", self.name(field))
        return value

    def choice(self, field: str, default: str, allowed: Iterable[str]) -> str:
        value = self.text(field, default)
        if value not in (known := tuple(allowed)):
            message = f"{self.name(field)} must be one of {', '.join(known)}"
            raise InvalidRequest(message, self.name(field))
        return value

    def check_names(self, known: frozenset[str], not_offered: Mapping[str, str]) -> None:
        """Refuses a field that nobody would read: it would be a wish without effect. One that is
        not offered may say that it is not wanted."""
        for name, value in self._values.items():
            if name in known or (name in not_offered and _is_left_out(name, value)):
                continue
            shown = self.name(name[:MAX_SHOWN_CHARS])
            if name in not_offered:
                raise InvalidRequest(f"{shown} is not offered: {not_offered[name]}", shown)
            near = suggestion(name[:MAX_SHOWN_CHARS], known)
            raise InvalidRequest(f"{shown} is no known field{near}", shown)

    def only(self, field: str, *allowed: object, why: str) -> None:
        """Refuses a feature that is not offered here, and says why, unless asked to leave it
        off."""
        value = self._values.get(field)
        if value is not None and not any(value is a or value == a for a in allowed):
            raise InvalidRequest(f"{self.name(field)} is not offered: {why}", self.name(field))


def _is_left_out(field: str, value: object) -> bool:
    """Clients send the defaults of the servers they know."""
    if value is not None and field in AS_LEFT_OUT:
        return value == AS_LEFT_OUT[field]
    return value is False or value in (None, [], {})
