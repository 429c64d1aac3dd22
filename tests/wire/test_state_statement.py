"""The statement of a state file: what is read is what was written, and nothing that is out of
bounds; and who is believed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.cluster_keys import KEY, STRANGERS_KEY

from ferryman.cache.manifest import Kind
from ferryman.errors import ConfigError, InvalidRequest, PermissionDenied, TooLarge
from ferryman.security.state_signatures import StateSigner, is_state_signed
from ferryman.wire.codec.state_statement import (
    MAX_STATE_TOKENS,
    StateStatement,
    spans_of,
    statement_from_json,
    statement_to_json,
)

# Windows of 21 tokens: resuming at 64 needs the pages 2 and 3.
STATEMENT = StateStatement(
    model="tiny",
    family="FerrymanNativeForCausalLM",
    dtype="float32",
    fingerprint="f0",
    page_size=16,
    window_len=21,
    digest="d0",
    arithmetic="cpu/loops/float64/r0/tp1",
    adapter="",
    num_tokens=64,
    pages={Kind.FULL: ((0, 4),), Kind.RECURRENT: ((1, 2), (3, 4)), Kind.WINDOW: ((2, 4),)},
    unit_bytes={Kind.FULL: 128, Kind.RECURRENT: 1000, Kind.WINDOW: 64},
    tokens_digest=32 * "ab",
    units_digest=32 * "cd",
    signer=32 * "ef",
)


def test_a_statement_is_read_as_it_was_written() -> None:
    read = statement_from_json(statement_to_json(STATEMENT))
    assert read == STATEMENT
    assert [*read.names] == [
        *((Kind.FULL, page) for page in range(4)),
        *((Kind.RECURRENT, page) for page in (1, 3)),
        *((Kind.WINDOW, page) for page in (2, 3)),
    ]
    assert (read.num_units, read.num_pages) == (8, 4)
    assert read.num_bytes == 4 * 64 + 4 * 128 + 2 * 1000 + 2 * 64
    assert spans_of([*read.names], (Kind.WINDOW, Kind.FULL, Kind.RECURRENT)) == read.pages


WRONG: list[tuple[str, Any]] = [
    ("version", 2),
    ("version", True),
    ("page_size", 0),
    ("page_size", 16.0),
    ("page_size", "16"),
    ("num_tokens", 0),
    ("num_tokens", 65),
    ("num_tokens", MAX_STATE_TOKENS + 16),
    ("window_len", 0),
    ("window_len", -1),
    ("model", 7),
    ("model", "a\nb"),
    ("model", 600 * "a"),
    ("signer", "no hex"),
    ("units_digest", None),
    ("pages", []),
    ("pages", {}),
    ("pages", {"full": [[0, 4]]}),
    ("pages", {"full": [[0, 4]], "recurrent": [[1, 2]], "window": [[2, 4]]}),
    ("pages", {"full": [[0, 4]], "recurrent": [[3, 4]], "window": [[3, 4]]}),
    ("pages", {"full": [[0, 3]], "recurrent": [[3, 4]], "window": [[2, 4]]}),
    ("pages", {"full": [[0, 5]], "recurrent": [[3, 4]], "window": [[2, 4]]}),
    ("pages", {"full": [[2, 4], [0, 2]], "recurrent": [[3, 4]], "window": [[2, 4]]}),
    ("pages", {"full": [[0, 2], [1, 4]], "recurrent": [[3, 4]], "window": [[2, 4]]}),
    ("pages", {"full": [[-1, 4]], "recurrent": [[3, 4]], "window": [[2, 4]]}),
    ("pages", {"full": [[0, 1 << 40]], "recurrent": [[3, 4]], "window": [[2, 4]]}),
    ("pages", {"window": [[2, 4]], "recurrent": [[3, 4]], "full": [[0, 4]]}),
    ("pages", {"full": [[0, 4]], "other": [[3, 4]], "window": [[2, 4]]}),
    ("unit_bytes", {"full": 128, "recurrent": 1000}),
    ("unit_bytes", {"full": 0, "recurrent": 1000, "window": 64}),
    ("unit_bytes", {"full": 1 << 40, "recurrent": 1000, "window": 64}),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_field_out_of_bounds_is_refused(field: str, value: Any) -> None:
    raw = json.loads(statement_to_json(STATEMENT))
    raw[field] = value
    with pytest.raises(InvalidRequest):
        statement_from_json(json.dumps(raw))


def test_fields_that_are_missing_or_unknown_are_named() -> None:
    raw = json.loads(statement_to_json(STATEMENT))
    raw["salt"] = raw.pop("signer")
    with pytest.raises(InvalidRequest, match="salt, signer"):
        statement_from_json(json.dumps(raw))


@pytest.mark.parametrize("text", ["", "7", "[]", "null", "{}", '"a"', 6000 * "[", "\ud800"])
def test_what_is_no_statement_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        statement_from_json(text)


def test_a_statement_that_is_too_long_is_refused_unread() -> None:
    with pytest.raises(TooLarge):
        statement_from_json(13_000 * " ")
    odd_pages = tuple((page, page + 1) for page in range(1, 4001, 2))
    pages = {Kind.FULL: ((0, 4001),), Kind.RECURRENT: odd_pages}
    with pytest.raises(TooLarge):
        statement_to_json(replace(STATEMENT, pages=pages))


def test_a_cluster_believes_itself_and_those_it_was_told_to() -> None:
    ours, theirs = StateSigner(KEY), StateSigner(STRANGERS_KEY)
    signature = theirs.sign("text")
    assert is_state_signed(theirs.public_key, signature, "text")
    with pytest.raises(PermissionDenied, match=theirs.public_key):
        ours.check(theirs.public_key, signature, "text")
    believer = StateSigner(KEY, [theirs.public_key.upper()])
    believer.check(theirs.public_key, signature, "text")
    believer.check(ours.public_key, ours.sign("text"), "text")
    for signer, text in ((theirs, "other"), (ours, "text")):
        with pytest.raises(PermissionDenied, match="was changed"):
            believer.check(signer.public_key, signature, text)
    assert not is_state_signed("no key", signature, "text")


@pytest.mark.parametrize("text", ["", "ab", 64 * "x", 66 * "a"])
def test_a_signer_that_is_no_public_key_is_a_wrong_setting(text: str) -> None:
    with pytest.raises(ConfigError, match="STATE_SIGNERS"):
        StateSigner(KEY, [text])
