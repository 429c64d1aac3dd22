"""The cluster key: never shown, one sub-key a purpose, and a file that is made once."""

from __future__ import annotations

import logging
import os
import threading
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cluster_keys import KEY, STRANGERS_KEY, key_file_in

from ferryman.errors import ConfigError
from ferryman.security.cluster_key import ClusterKey, Purpose, cluster_key_from_text
from ferryman.security.key_file import make_key_file, read_key_file

PARTS = st.lists(st.binary(max_size=5), max_size=4)
KEYS = [KEY.subkey(purpose) for purpose in Purpose]


@given(PARTS, PARTS)
def test_a_tag_verifies_for_just_its_parts(parts: list[bytes], others: list[bytes]) -> None:
    """The same bytes in other parts must not verify either."""
    key = KEYS[0]
    assert key.verifies(key.tag(*parts), *parts)
    assert key.verifies(key.tag(*parts), *others) == (parts == others)


def test_a_tag_is_worth_nothing_for_another_purpose_or_in_another_cluster() -> None:
    for one, other in combinations([*KEYS, STRANGERS_KEY.subkey(Purpose.TENANT_SALT)], 2):
        assert not other.verifies(one.tag(b"same"), b"same")


@pytest.mark.parametrize("tag", [b"", b"\x00" * 16, b"x" * 15])
def test_what_is_no_tag_verifies_nothing(tag: bytes) -> None:
    assert not KEYS[0].verifies(tag, b"part")


def test_neither_key_is_ever_shown() -> None:
    for shown in (repr(KEY), str(KEY), f"{KEYS[0]!r}", f"{KEYS}"):
        assert KEY.secret.hex() not in shown
        assert repr(KEY.secret)[2:-1] not in shown
        assert repr(KEYS[0].secret)[2:-1] not in shown


@pytest.mark.parametrize("text", ["", "00" * 31, "00" * 33, "zz" * 32, "é" * 64, "0x" + "00" * 31])
def test_a_malformed_key_is_refused_without_being_repeated(text: str, tmp_path: Path) -> None:
    file = key_file_in(tmp_path)
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_key_file(file)
    assert str(refused.value).count("\n") == 0
    assert not text or text not in str(refused.value)


def test_a_key_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_key_file(key_file_in(tmp_path)) == KEY
    assert cluster_key_from_text(f"  {KEY.text.upper()}\r\n") == KEY


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_key_of_another_length_cannot_be_made(length: int) -> None:
    with pytest.raises(ConfigError):
        ClusterKey(bytes(length))


def test_a_file_that_is_missing_or_a_folder_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ferryman key"):
        read_key_file(tmp_path / "none")
    with pytest.raises(ConfigError, match="no file"):
        read_key_file(tmp_path)


def test_a_key_that_others_may_read_is_taken_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = key_file_in(tmp_path)
    with caplog.at_level(logging.WARNING):
        read_key_file(file)
        assert not caplog.records
        file.chmod(0o644)
        assert read_key_file(file) == KEY
    (warning,) = caplog.records
    assert "others" in warning.getMessage()
    assert KEY.text not in warning.getMessage()


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_key_that_others_may_change_is_refused(tmp_path: Path, mode: int) -> None:
    file = key_file_in(tmp_path)
    file.chmod(mode)
    with pytest.raises(ConfigError, match="others may write"):
        read_key_file(file)


def test_a_made_key_is_its_owners_alone_and_stays_what_it_is(tmp_path: Path) -> None:
    file = tmp_path / "cluster.key"
    make_key_file(file)
    key = read_key_file(file)
    assert file.stat().st_mode & 0o777 == 0o600
    make_key_file(file)
    assert read_key_file(file) == key
    assert os.listdir(tmp_path) == ["cluster.key"], "no draft is left"
    make_key_file(tmp_path / "other")
    assert read_key_file(tmp_path / "other") != key, "keys are random"


def test_two_that_make_a_key_at_the_same_time_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find no file, write their drafts, and only then link them to the name."""
    file, both, real = tmp_path / "cluster.key", threading.Barrier(2), os.link
    found: list[ClusterKey] = []

    def link(source: Path, target: Path) -> None:
        both.wait(20)
        real(source, target)

    def start() -> None:
        make_key_file(file)
        found.append(read_key_file(file))

    monkeypatch.setattr(os, "link", link)
    starters = [threading.Thread(target=start) for _ in range(2)]
    for each in starters:
        each.start()
    for each in starters:
        each.join()
    assert len(found) == 2
    assert found[0] == found[1]
    assert os.listdir(tmp_path) == ["cluster.key"]


def test_where_no_file_can_be_made_it_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cluster key"):
        make_key_file(tmp_path / "missing" / "cluster.key")
