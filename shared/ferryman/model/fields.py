"""Typed reading of a Hugging Face JSON file: a missing or wrong field is a ConfigError by name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ferryman.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one JSON object, and the file they came from."""

    source: Path
    raw: Mapping[str, Any]

    def whole(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refusal(name, f"a whole number of at least {least}")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if not _is_real(value):
            raise self.refusal(name, "a number")
        return float(value)

    def reals(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """As many numbers as the default has."""
        value = self._value(name, list(default))
        is_list = isinstance(value, list) and len(value) == len(default)
        if not is_list or not all(_is_real(each) for each in value):
            raise self.refusal(name, f"a list of {len(default)} numbers")
        return tuple(float(each) for each in value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.refusal(name, "true or false")
        return value

    def words(self, name: str) -> tuple[str, ...]:
        value = self._value(name, None)
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.refusal(name, "a list of strings")
        return tuple(value)

    def whole_list(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers; one number alone counts as a list, null as an empty one."""
        value = self.raw.get(name)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
            raise self.refusal(name, "a token id or a list of them")
        return tuple(values)

    def beneath(self, name: str) -> Fields:
        """The fields of the object `name`, if there is one, before those of the whole."""
        nested = self.raw.get(name) or {}
        if not isinstance(nested, dict):
            raise self.refusal(name, "an object")
        return Fields(self.source, {**self.raw, **nested})

    def refusal(self, name: str, expected: str) -> ConfigError:
        """The error that says which field of which file must become what."""
        found = json.dumps(self.raw[name], default=str) if name in self.raw else "missing"
        return ConfigError(f"{self.source}: field {name!r} must be {expected}; it is {found}")

    def _value(self, name: str, default: object) -> Any:
        """The field; null counts as absent, since that is how transformers writes a default."""
        value = self.raw.get(name)
        if value is not None:
            return value
        if default is None:
            raise self.refusal(name, "given")
        return default


def _is_real(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and not math.isnan(value)  # type: ignore[arg-type]


def read_fields(path: Path) -> Fields:
    """The JSON object in `path`."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_hook=_plain_number)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; name a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return Fields(path, raw)


def _plain_number(raw: dict[str, Any]) -> Any:
    """transformers writes infinity as {"__float__": "Infinity"}, which JSON has no word for."""
    return float(raw["__float__"]) if raw.keys() == {"__float__"} else raw
