"""State files on a disk: written whole or not at all, and read only if they are what they say."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from tests.cluster_keys import KEY

from ferryman.cache.manifest import Kind
from ferryman.errors import ConfigError, CorruptState, InvalidRequest
from ferryman.security.state_signatures import StateSigner
from ferryman.wire.codec.state_statement import (
    StateStatement,
    content_digest,
    statement_to_json,
    tokens_digest,
)
from ferryman.wire.public import SignedState
from ferryman_cli.app import run
from ferryman_cli.state.state_file import HEADER_BYTES, opened_state_file, written_state_file

TOKENS = np.arange(3, 35, dtype="<u4")
UNITS = [bytes([number]) * size for number, size in ((1, 40), (2, 40), (3, 100))]


def signed_state() -> SignedState:
    digests = b"".join(map(content_digest, UNITS))
    signer = StateSigner(KEY)
    text = statement_to_json(
        StateStatement(
            model="tiny",
            family="Toy",
            dtype="float32",
            fingerprint="f0",
            page_size=16,
            window_len=0,
            digest="d0",
            arithmetic="any",
            adapter="",
            num_tokens=32,
            pages={Kind.FULL: ((0, 2),), Kind.RECURRENT: ((1, 2),)},
            unit_bytes={Kind.FULL: 40, Kind.RECURRENT: 100},
            tokens_digest=tokens_digest(TOKENS),
            units_digest=content_digest(digests).hex(),
            signer=signer.public_key,
        )
    )
    return SignedState(text, signer.sign(text), digests)


@pytest.fixture
def kite(tmp_path: Path) -> Path:
    path = tmp_path / "kite.fst"
    with written_state_file(path) as file:
        for data in (TOKENS.tobytes(), *UNITS):
            file.add(data)
        file.finish(signed_state())
    return path


def test_a_file_is_read_as_it_was_written(kite: Path) -> None:
    with opened_state_file(kite) as file:
        assert file.signed == signed_state()
        assert b"".join(file.pieces()) == TOKENS.tobytes() + b"".join(UNITS)
        assert file.num_bytes == kite.stat().st_size
        file.check()
    tensors = safetensors.numpy.load_file(kite)
    assert tensors["tokens"].tolist() == TOKENS.tolist()
    assert tensors["full"].tobytes() == UNITS[0] + UNITS[1]
    assert tensors["recurrent"].tobytes() == UNITS[2]
    assert tensors["digests"].tobytes() == signed_state().unit_digests
    assert kite.stat().st_mode & 0o777 == 0o600


def test_a_name_that_is_taken_stays_as_it_is(kite: Path) -> None:
    before = kite.read_bytes()
    with pytest.raises(ConfigError, match="exists already"), written_state_file(kite):
        pass
    assert kite.read_bytes() == before


def test_a_name_that_was_taken_meanwhile_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "late.fst"

    def write_late() -> None:
        with written_state_file(path) as file:
            file.add(TOKENS.tobytes() + b"".join(UNITS))
            path.write_text("another")
            file.finish(signed_state())

    with pytest.raises(ConfigError, match="File exists"):
        write_late()
    assert path.read_text() == "another"
    assert [*tmp_path.iterdir()] == [path]


def test_what_was_not_finished_leaves_nothing(tmp_path: Path) -> None:
    def write_some(*, is_finished: bool) -> None:
        with written_state_file(tmp_path / "a.fst") as file:
            file.add(b"some")
            if is_finished:
                file.finish(signed_state())

    write_some(is_finished=False)
    with pytest.raises(CorruptState):
        write_some(is_finished=True)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ConfigError), written_state_file(tmp_path / "absent" / "a.fst"):
        pass


def rewritten(kite: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Replaces the header by a changed one of the same length."""
    raw = kite.read_bytes()
    fields = json.loads(raw[8 : 8 + HEADER_BYTES])
    change(fields)
    header = json.dumps(fields).encode().ljust(HEADER_BYTES)
    kite.write_bytes(raw[:8] + header + raw[8 + HEADER_BYTES :])


CHANGES: list[Callable[[dict[str, object]], object]] = [
    lambda fields: fields.pop("__metadata__"),
    lambda fields: fields.pop("tokens"),
    lambda fields: fields.update(more={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
    lambda fields: fields.update(__metadata__={"format": "other"}),
    lambda fields: fields.update(__metadata__={"format": "ferryman.state", "statement": "{}"}),
    lambda fields: fields.update(full={"dtype": "U8", "shape": [2, 40], "data_offsets": [0, 80]}),
]


@pytest.mark.parametrize("change", CHANGES)
def test_another_header_is_refused(
    kite: Path, change: Callable[[dict[str, object]], object]
) -> None:
    rewritten(kite, change)
    with pytest.raises(InvalidRequest), opened_state_file(kite):
        pass


def test_a_file_that_is_cut_or_longer_is_refused(kite: Path) -> None:
    raw = kite.read_bytes()
    for other in (b"", raw[:7], raw[:100], raw[:-1], raw + b"\0", bytes(len(raw))):
        kite.write_bytes(other)
        with pytest.raises(InvalidRequest, match="is no state file"), opened_state_file(kite):
            pass


def test_every_bit_of_the_content_counts(kite: Path) -> None:
    raw = kite.read_bytes()
    for place in range(8 + HEADER_BYTES, len(raw), 7):
        spoilt = bytearray(raw)
        spoilt[place] ^= 0x10
        kite.write_bytes(spoilt)
        with opened_state_file(kite) as file, pytest.raises(CorruptState):
            file.check()


def test_a_statement_that_was_changed_is_found(kite: Path) -> None:
    raw = kite.read_bytes()
    kite.write_bytes(raw.replace(b'\\"tiny\\"', b'\\"tidy\\"'))
    with opened_state_file(kite) as file, pytest.raises(CorruptState, match="was changed"):
        file.check()


def test_links_pipes_and_folders_are_not_read(kite: Path, tmp_path: Path) -> None:
    link, pipe = tmp_path / "link.fst", tmp_path / "pipe.fst"
    link.symlink_to(kite)
    os.mkfifo(pipe)
    for path in (link, pipe, tmp_path, tmp_path / "absent.fst"):
        with pytest.raises(ConfigError), opened_state_file(path):
            pass


def test_a_damaged_file_is_found_before_any_cluster_is_asked(
    kite: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = bytearray(kite.read_bytes())
    raw[-100] ^= 1
    kite.write_bytes(raw)
    # Nobody listens there.
    assert run(["state", "load", str(kite), "--grpc", "127.0.0.1:1"]) == 1
    assert "damaged" in capsys.readouterr().err
    assert run(["state", "show", str(kite)]) == 1
    raw[-100] ^= 1
    kite.write_bytes(raw)
    assert run(["state", "show", str(kite)]) == 0
    assert "2 full, 1 recurrent" in capsys.readouterr().out
