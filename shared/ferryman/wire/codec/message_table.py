"""One table per message maps a value's fields to it, and makes both directions.

A field with the same name and form on both sides needs no entry. A field of a value or of a message
without a place is a TypeError when the table is made, so no field is forgotten on one side. A table
makes a small message up to twice as slow, so messages for each token and each unit are written by
hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, NamedTuple, TypeVar

from google.protobuf.message import Message

from ferryman.errors import InvalidRequest

V = TypeVar("V")
M = TypeVar("M", bound=Message)


class Codec(NamedTuple, Generic[V, M]):
    """Both directions; `from_wire` raises InvalidRequest for a meaningless message."""

    to_wire: Callable[[V], M]
    from_wire: Callable[[M], V]


def same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class At:
    """One field, converted; `name` is its name in the message, if that differs."""

    to_wire: Callable[[Any], Any]
    from_wire: Callable[[Any], Any]
    name: str = ""


@dataclass(frozen=True, slots=True)
class Within:
    """A value without a message of its own: its fields, `names`, lie in the outer value's
    message."""

    names: tuple[str, ...]
    to_fields: Callable[[Any], Mapping[str, Any]]
    from_message: Callable[[Any], Any]


# A string is the message's name of a field that needs no conversion; a codec makes its message.
Entry = str | Codec[Any, Any] | At | Within


def each(codec: Codec[Any, Any], name: str = "") -> At:
    """A tuple of values with a message each."""
    to_wire, from_wire = codec
    return At(
        lambda values: [to_wire(value) for value in values],
        lambda messages: tuple(from_wire(message) for message in messages),
        name,
    )


def within(value_type: type[Any], **entries: Entry) -> Within:
    """A value whose fields all lie in the outer value's message."""
    places = _places(entries)
    plain, names = _names(value_type, places)
    return Within(names, _writer(plain, places), _reader(value_type, plain, places))


def table(value_type: type[V], message_type: type[M], **entries: Entry) -> Codec[V, M]:
    """Values of a dataclass as messages of one type."""
    places = _places(entries)
    plain, names = _names(value_type, places)
    _check_all(message_type, message_type.DESCRIPTOR.fields_by_name, names)
    to_fields = _writer(plain, places)
    from_message = _reader(value_type, plain, places)
    return Codec(lambda value: message_type(**to_fields(value)), from_message)


def oneof(
    message_type: type[M], name: str, nothing: str, **cases: tuple[type, Codec[Any, Any]]
) -> Codec[Any, M]:
    """One of several types of value, each in a field of a oneof. `nothing` is the error's text when
    no field is set."""
    fields_there = message_type.DESCRIPTOR.oneofs_by_name[name].fields
    _check_all(message_type, [field.name for field in fields_there], cases)
    ways = {kind: (field, codec.to_wire) for field, (kind, codec) in cases.items()}

    def to_wire(value: Any) -> M:
        field, convert = ways[type(value)]
        return message_type(**{field: convert(value)})

    def from_wire(message: M) -> Any:
        field = message.WhichOneof(name)
        if field is None:
            raise InvalidRequest(nothing, name)
        return cases[field][1].from_wire(getattr(message, field))

    return Codec(to_wire, from_wire)


def _places(entries: Mapping[str, Entry]) -> dict[str, At | Within]:
    places: dict[str, At | Within] = {}
    for name, entry in entries.items():
        match entry:
            case str():
                places[name] = At(same, same, entry)
            case Codec():
                places[name] = At(entry.to_wire, entry.from_wire)
            case _:
                places[name] = entry
    return places


def _names(
    value_type: type[Any], places: Mapping[str, At | Within]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields without an entry, and the message's names of all fields."""
    field_names = [field.name for field in fields(value_type)]
    if odd := set(places).difference(field_names):
        raise TypeError(f"{value_type.__name__} has no {sorted(odd)}")
    plain = tuple(name for name in field_names if name not in places)
    taken = list(plain)
    for name, place in places.items():
        taken += [place.name or name] if isinstance(place, At) else place.names
    return plain, tuple(taken)


def _check_all(message_type: type[Message], there: Iterable[str], named: Iterable[str]) -> None:
    if odd := set(there) ^ set(named):
        raise TypeError(f"{message_type.__name__}: {sorted(odd)} have no place")


def _writer(
    plain: Iterable[str], places: Mapping[str, At | Within]
) -> Callable[[Any], dict[str, Any]]:
    # Computed once, here: the returned function runs for every message.
    ats = [(n, at.name or n, at.to_wire) for n, at in places.items() if isinstance(at, At)]
    inner = [(n, within.to_fields) for n, within in places.items() if isinstance(within, Within)]

    def to_fields(value: Any) -> dict[str, Any]:
        message_fields = {name: getattr(value, name) for name in plain}
        for name, wire_name, convert in ats:
            message_fields[wire_name] = convert(getattr(value, name))
        for name, spread in inner:
            message_fields.update(spread(getattr(value, name)))
        return message_fields

    return to_fields


def _reader(
    value_type: type[V], plain: Iterable[str], places: Mapping[str, At | Within]
) -> Callable[[Any], V]:
    # In the order of the entries: of several errors, the first is reported.
    entries = [
        (name, place.name or name, place.from_wire)
        if isinstance(place, At)
        else (name, "", place.from_message)
        for name, place in places.items()
    ]

    def from_message(message: Any) -> V:
        values = {
            name: read(getattr(message, wire_name) if wire_name else message)
            for name, wire_name, read in entries
        }
        for name in plain:
            values[name] = getattr(message, name)
        return value_type(**values)

    return from_message
