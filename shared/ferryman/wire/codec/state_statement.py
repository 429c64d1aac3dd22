"""The statement of a state file: which state it is, and digests of its bytes, signed as one text.

    statement (JSON) ── signature of the cluster that saved it
        ├ model, layout, arithmetic      compared with those of the cluster that loads it
        ├ digest of the token ids        the page keys are computed anew, under the loader's tenant
        └ digest of the units' digests   each unit is compared before it is passed on

docs/state-files.md has the format of the file around it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from typing import Any

from ferryman.cache.candidates import resume_unit_names
from ferryman.cache.keys import TokenIds, as_token_ids
from ferryman.cache.manifest import Kind, ResumeShape
from ferryman.errors import InvalidRequest, TooLarge
from ferryman.handoff.values import UnitName, ranges_of

VERSION = 1
DIGEST_BYTES = 32
PIECE_BYTES = 1 << 20
MAX_STATEMENT_BYTES = 12 << 10
MAX_STATE_TOKENS = 1 << 20
MAX_STATE_UNITS = 1 << 16
MAX_UNIT_BYTES = 1 << 30
MAX_PAGE_SIZE = 1 << 16
MAX_TEXT = 512

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class StateStatement:
    """The state of the first `num_tokens` tokens of a conversation, a whole number of pages.

    `pages` are half-open ranges of each kind's units, a snapshot at the page that it ends;
    `unit_bytes` is the size of one unit. Kinds are in the order of their names. `digest` is the
    state manifest's. `model`, `family` and `dtype` are for people. Digests are blake2b of
    DIGEST_BYTES, in hex.
    """

    model: str
    family: str
    dtype: str
    fingerprint: str
    page_size: int
    window_len: int
    digest: str
    arithmetic: str
    adapter: str
    num_tokens: int
    pages: Mapping[Kind, Spans]
    unit_bytes: Mapping[Kind, int]
    tokens_digest: str
    units_digest: str
    signer: str

    @property
    def num_pages(self) -> int:
        return self.num_tokens // self.page_size

    @property
    def names(self) -> Iterator[UnitName]:
        """The units in the order of their bytes: kind by kind, page by page."""
        for kind, spans in self.pages.items():
            yield from ((kind, page) for first, end in spans for page in range(first, end))

    def count(self, kind: Kind) -> int:
        """Units of a kind."""
        return sum(end - first for first, end in self.pages[kind])

    @property
    def num_units(self) -> int:
        return sum(map(self.count, self.pages))

    @property
    def num_bytes(self) -> int:
        """Bytes of token ids and units."""
        units = (self.count(kind) * self.unit_bytes[kind] for kind in self.pages)
        return 4 * self.num_tokens + sum(units)


def spans_of(names: Sequence[UnitName], kinds: Sequence[Kind]) -> dict[Kind, Spans]:
    """The ranges of units, by kind; empty for a kind without any."""
    spans: dict[Kind, Spans] = dict.fromkeys(sorted(kinds), ())
    for span in ranges_of(names):
        spans[span.kind] += ((span.first, span.end),)
    return spans


def content_digest(content: bytes | memoryview) -> bytes:
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


def tokens_digest(token_ids: TokenIds) -> str:
    """The digest of token ids as little-endian u32."""
    return content_digest(as_token_ids(token_ids).tobytes()).hex()


def statement_to_json(statement: StateStatement) -> str:
    """The text that is signed. Raises TooLarge."""
    text = json.dumps({"version": VERSION, **asdict(statement)}, separators=(",", ":"))
    if len(text.encode()) > MAX_STATEMENT_BYTES:
        raise TooLarge("the state lies in too many pieces for one file", "statement")
    return text


def statement_from_json(text: str) -> StateStatement:
    """Inverse of `statement_to_json`. Raises InvalidRequest for another version, a field that is
    missing, unknown or out of bounds, and for units that nobody could resume from."""
    if len(text.encode("utf-8", "replace")) > MAX_STATEMENT_BYTES:
        raise TooLarge(f"a statement has at most {MAX_STATEMENT_BYTES} bytes", "statement")
    try:
        raw = json.loads(text)
        version = raw.pop("version")
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError):
        raise _wrong("it is no statement about state") from None
    if version != VERSION or isinstance(version, bool):
        raise _wrong(f"version {str(version)[:20]} is not read; this Ferryman reads {VERSION}")
    names = {field.name for field in fields(StateStatement)}
    if raw.keys() != names:
        odd = sorted(raw.keys() ^ names)
        raise _wrong(f"fields missing or unknown: {', '.join(odd)[:200]}")
    try:
        statement = _read(raw)
        _check_whole(statement)
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError) as error:
        raise _wrong(str(error)[:200]) from None
    return statement


def _read(raw: Mapping[str, Any]) -> StateStatement:
    values: dict[str, Any] = {
        "page_size": _number(raw, "page_size", 1, MAX_PAGE_SIZE),
        "window_len": _number(raw, "window_len", 0, 1 << 31),
        "num_tokens": _number(raw, "num_tokens", 1, MAX_STATE_TOKENS),
        "pages": {Kind(kind): _spans(spans) for kind, spans in raw["pages"].items()},
        "unit_bytes": {
            Kind(kind): _number(raw["unit_bytes"], kind, 1, MAX_UNIT_BYTES)
            for kind in raw["unit_bytes"]
        },
    }
    values |= {name: _text(raw, name) for name in raw.keys() - values.keys()}
    for name in ("adapter", "tokens_digest", "units_digest", "signer"):
        bytes.fromhex(values[name])
    return StateStatement(**values)


def _number(raw: Mapping[str, Any], name: str, least: int, most: int) -> int:
    number = raw[name]
    if type(number) is not int or not least <= number <= most:
        raise ValueError(f"{name} is no whole number from {least} to {most}")
    return number


def _text(raw: Mapping[str, Any], name: str) -> str:
    text = raw[name]
    if type(text) is not str or len(text) > MAX_TEXT or not (text.isprintable() or not text):
        raise ValueError(f"{name} is no text of at most {MAX_TEXT} characters")
    return text


def _spans(raw: Any) -> Spans:
    spans: list[tuple[int, int]] = []
    for first, end in raw:
        before = spans[-1][1] if spans else -1
        if type(first) is not int or type(end) is not int or not before < first < end:
            raise ValueError("ranges of pages are not in order")
        spans.append((first, end))
    return tuple(spans)


def _check_whole(statement: StateStatement) -> None:
    """Raises ValueError unless a request can resume at the end of the tokens."""
    pages, page_size = statement.pages, statement.page_size
    if not pages or pages.keys() != statement.unit_bytes.keys() or [*pages] != sorted(pages):
        raise ValueError("pages and unit_bytes have the same kinds, in order")
    if statement.num_tokens % page_size:
        raise ValueError(f"num_tokens is not a multiple of {page_size}")
    ends = [spans[-1][1] for spans in pages.values() if spans]
    if max(ends, default=0) > statement.num_pages or statement.num_units > MAX_STATE_UNITS:
        raise ValueError(f"units beyond page {statement.num_pages}, or above {MAX_STATE_UNITS}")
    if (statement.window_len > 0) != (Kind.WINDOW in pages):
        raise ValueError("window_len and pages of windows come together")
    shape = ResumeShape(page_size, statement.window_len, frozenset(pages))
    missing = {*resume_unit_names(shape, statement.num_pages)} - {*statement.names}
    if missing:
        raise ValueError(f"{len(missing)} units that a request needs are not in the file")


def _wrong(reason: str) -> InvalidRequest:
    return InvalidRequest(f"state file: {reason}", "statement")
