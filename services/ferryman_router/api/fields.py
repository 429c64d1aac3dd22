"""JSON bodies, read field by field: every refusal names the field and says what it should be."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from ferryman.errors import InvalidRequest


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. NaN and Infinity are not JSON; neither are half characters."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8 at byte {error.start}") from error
    except InvalidRequest:
        raise
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


def _refuse(constant: str) -> NoReturn:
    raise InvalidRequest(f"{constant} is not valid JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InvalidRequest(f"{text[:40]} is too large a number")
    return value


class Fields:
    """The fields of one object; null is the same as absent, as in OpenAI's own interface."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values, self._path = values, path

    def name(self, field: str) -> str:
        return f"{self._path}.{field}" if self._path else field

    def has(self, field: str) -> bool:
        return self._values.get(field) is not None

    def value(self, field: str, default: Any = None) -> Any:
        """As it is, for what is checked elsewhere."""
        found = self._values.get(field)
        return default if found is None else found

    def flag(self, field: str) -> bool:
        value = self.value(field, False)
        if not isinstance(value, bool):
            raise InvalidRequest(f"{self.name(field)} must be true or false", self.name(field))
        return value

    def text(self, field: str, default: str = "") -> str:
        value = self.value(field, default)
        if not isinstance(value, str):
            raise InvalidRequest(f"{self.name(field)} must be a string", self.name(field))
        return value

    def whole(self, field: str, default: int, *, low: int, high: int) -> int:
        value = self.value(field, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            message = f"{self.name(field)} must be a whole number from {low} to {high}"
            raise InvalidRequest(message, self.name(field))
        return value

    def items(self, field: str) -> list[Any]:
        value = self.value(field, [])
        if not isinstance(value, list):
            raise InvalidRequest(f"{self.name(field)} must be a list", self.name(field))
        return value

    def inner(self, field: str) -> Fields:
        value = self.value(field, {})
        if not isinstance(value, dict):
            raise InvalidRequest(f"{self.name(field)} must be an object", self.name(field))
        return Fields(value, self.name(field))

    def only(self, field: str, *allowed: object) -> None:
        """Refuses a feature that is not offered here, unless asked to leave it off."""
        value = self._values.get(field)
        if value is not None and not any(value is a or value == a for a in allowed):
            raise InvalidRequest(f"{self.name(field)} is not supported here", self.name(field))
