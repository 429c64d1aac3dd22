"""Typed reading of a Hugging Face JSON file: a missing or wrong field is a ConfigError by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ferryman.errors import ConfigError
from ferryman.gguf.documents import read_document

LEAST_FLOAT32, LARGEST_FLOAT32 = 2.0**-126, 3.4e38
WHOLE_NUMBERS = "a list of whole numbers from 0 on"
TOKEN_IDS = "a token id or a list of them"


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """The fields of one JSON object, and the file they came from."""

    source: Path
    raw: Mapping[str, Any]

    def whole(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refusal(name, f"a whole number of at least {least}")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        """A finite number above 0, such as a factor, a divisor or an epsilon."""
        value = self._value(name, default)
        if not _is_positive(value):
            raise self.refusal(name, "a finite number above 0")
        return float(value)

    def positives(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """A list of finite numbers above 0, as long as the default."""
        value = self._value(name, list(default))
        is_list = isinstance(value, list) and len(value) == len(default)
        if not is_list or not all(_is_positive(number) for number in value):
            raise self.refusal(name, f"a list of {len(default)} finite numbers above 0")
        return tuple(float(number) for number in value)

    def not_negative(self, name: str, default: float) -> float:
        """A finite number from 0 on; 0 switches the feature off."""
        value = self._value(name, default)
        if value != 0 and not _is_positive(value):
            raise self.refusal(name, "0 or a finite number above it")
        return float(value)

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

    def whole_list(self, name: str, expected: str = WHOLE_NUMBERS) -> tuple[int, ...]:
        """A list of whole numbers; one number alone counts as a list, null as an empty one. The
        error of any other value asks for `expected`."""
        value = self.raw.get(name)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
            raise self.refusal(name, expected)
        return tuple(values)

    def inner(self, name: str) -> ConfigFields:
        """The fields of the object `name`; none if it is absent or null."""
        nested = self._value(name, {})
        if not isinstance(nested, dict):
            raise self.refusal(name, "an object")
        return ConfigFields(self.source, nested)

    def merged_with(self, name: str) -> ConfigFields:
        """These fields, with those of the object `name`, if there is one, laid over them."""
        nested = self.raw.get(name) or {}
        if not isinstance(nested, dict):
            raise self.refusal(name, "an object")
        return ConfigFields(self.source, {**self.raw, **nested})

    def with_former(self, **former: str) -> ConfigFields:
        """These fields; one that is missing or null is read by its former name, as in
        `with_former(head_dim="attention_head_dim")`."""
        older = {
            name: self.raw[old]
            for name, old in former.items()
            if self.raw.get(old) is not None and self.raw.get(name) is None
        }
        return ConfigFields(self.source, {**self.raw, **older})

    def with_defaults(self, **defaults: object) -> ConfigFields:
        """These fields; one that is missing or null has its default."""
        present = {name: value for name, value in self.raw.items() if value is not None}
        return ConfigFields(self.source, {**self.raw, **defaults, **present})

    def refusal(self, name: str, expected: str) -> ConfigError:
        """The error that names the file, the field, its value and the expected value."""
        actual = json.dumps(self.raw[name], default=str) if name in self.raw else "missing"
        return ConfigError(f"{self.source}: field {name!r} must be {expected}; it is {actual}")

    def _value(self, name: str, default: object) -> Any:
        """The field's value; null counts as absent, because transformers writes a default so."""
        value = self.raw.get(name)
        if value is not None:
            return value
        if default is None:
            raise self.refusal(name, "given")
        return default


def _is_positive(value: object) -> bool:
    """True for a positive number within float32, in which models compute."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and LEAST_FLOAT32 <= value <= LARGEST_FLOAT32  # type: ignore[operator]


def read_fields(path: Path) -> ConfigFields:
    """The JSON object in `path`, or the document that a GGUF file has in its place."""
    try:
        raw: Any = read_document(path)
        if raw is None:
            raw = json.loads(path.read_text(encoding="utf-8"), object_hook=_plain_number)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; name a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return ConfigFields(path, raw)


def _plain_number(raw: dict[str, Any]) -> Any:
    """Reads the form in which transformers writes infinity, {"__float__": "Infinity"}."""
    return float(raw["__float__"]) if raw.keys() == {"__float__"} else raw
