"""Credentials of roles: RFC 5869's own vectors, one secret a use, private files."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tests.cluster_keys import KEY, STRANGERS_KEY

from ferryman.errors import ConfigError
from ferryman.runtime.access import given_credentials
from ferryman.security.cluster_key import ClusterKey
from ferryman.security.credentials import ClusterRole, credentials_of, hkdf_sha256
from ferryman.security.credentials_file import (
    read_credentials,
    write_all_credentials,
    write_credentials,
)
from ferryman.security.order_signatures import OrderSigner, OrderVerifier
from ferryman.settings.groups import AccessSettings

LONG = [bytes(range(begin, begin + 80)) for begin in (0x00, 0x60, 0xB0)]
# RFC 5869, appendix A: input key, salt, info, output.
VECTORS = [
    pytest.param(
        b"\x0b" * 22,
        bytes(range(13)),
        bytes(range(0xF0, 0xFA)),
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        id="A.1",
    ),
    pytest.param(
        *LONG,
        "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e"
        "590e09da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
        id="A.2",
    ),
    pytest.param(
        b"\x0b" * 22,
        b"",
        b"",
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        id="A.3",
    ),
]


@pytest.mark.parametrize(("secret", "salt", "info", "wanted"), VECTORS)
def test_the_vectors_of_rfc_5869(secret: bytes, salt: bytes, info: bytes, wanted: str) -> None:
    made = hkdf_sha256(secret, salt=salt, info=info, num_bytes=len(wanted) // 2)
    assert made.hex() == wanted


def secrets_of(role: ClusterRole, key: ClusterKey = KEY) -> set[str]:
    made = credentials_of(key, role)
    signing = {made.signing_seed} if role is ClusterRole.ROUTER else set()
    return {made.nats.password, made.redis.password, made.grpc_token} | signing


def test_every_role_use_and_cluster_has_a_secret_of_its_own() -> None:
    made = [secrets_of(role, key) for role in ClusterRole for key in (KEY, STRANGERS_KEY)]
    assert len(set().union(*made)) == (3 * len(ClusterRole) + 1) * 2
    assert secrets_of(ClusterRole.ROUTER) == secrets_of(ClusterRole.ROUTER), (
        "a restart makes the same ones"
    )


def test_no_secret_is_ever_shown_and_no_file_has_that_of_another(tmp_path: Path) -> None:
    mine = credentials_of(KEY, ClusterRole.DECODE)
    shown = f"{mine!r} {mine}"
    assert not any(secret in shown for secret in secrets_of(ClusterRole.DECODE))
    paths = write_all_credentials(tmp_path, KEY)
    for role, path in paths.items():
        text = path.read_text()
        others = set().union(*(secrets_of(each) for each in ClusterRole if each is not role))
        assert all(secret in text for secret in secrets_of(role))
        assert not any(secret in text for secret in others | {KEY.text})


def test_a_token_says_its_role_and_a_strangers_none() -> None:
    decode = credentials_of(KEY, ClusterRole.DECODE)
    for role in ClusterRole:
        assert decode.role_of(credentials_of(KEY, role).grpc_token) is role
        assert decode.role_of(credentials_of(STRANGERS_KEY, role).grpc_token) is None
        assert decode.role_of(decode.token_digests[role]) is None, "a digest is no token"
    assert decode.role_of("") is None
    assert decode.role_of("\udcff") is None


def test_routers_alone_can_sign_and_all_roles_know_by_which_key() -> None:
    router = credentials_of(KEY, ClusterRole.ROUTER)
    signed = OrderSigner(router.signing_seed).sign(b"an order")
    for role in ClusterRole:
        made = credentials_of(KEY, role)
        assert bool(made.signing_seed) is (role is ClusterRole.ROUTER)
        assert OrderVerifier(made.order_keys).verifies(signed, b"an order")
        other = credentials_of(STRANGERS_KEY, role)
        assert not OrderVerifier(other.order_keys).verifies(signed, b"an order")


def test_a_file_may_name_several_keys_of_which_one_has_signed(tmp_path: Path) -> None:
    """So keys can be changed while routers of both sorts run."""
    mine, other = (credentials_of(key, ClusterRole.DECODE) for key in (KEY, STRANGERS_KEY))
    path = tmp_path / "decode.json"
    write_credentials(path, replace(mine, order_keys=(*mine.order_keys, *other.order_keys)))
    verifier = OrderVerifier(read_credentials(path).order_keys)
    for key in (KEY, STRANGERS_KEY):
        seed = credentials_of(key, ClusterRole.ROUTER).signing_seed
        assert verifier.verifies(OrderSigner(seed).sign(b"an order"), b"an order")


def test_a_file_is_its_owners_alone_and_says_what_was_written(tmp_path: Path) -> None:
    paths = write_all_credentials(tmp_path, KEY)
    assert {path.name for path in tmp_path.iterdir()} == {f"{role}.json" for role in ClusterRole}
    for role, path in paths.items():
        assert path.stat().st_mode & 0o777 == 0o600
        assert read_credentials(path) == credentials_of(KEY, role)


def test_a_file_is_replaced_as_a_whole_even_where_others_could_read_it(tmp_path: Path) -> None:
    path = tmp_path / "decode.json"
    path.write_text("old")
    path.chmod(0o644)
    with path.open() as before:
        write_credentials(path, credentials_of(KEY, ClusterRole.DECODE))
        assert before.read() == "old", "a reader of the old file has all of it"
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_credentials(path) == credentials_of(KEY, ClusterRole.DECODE)


def _without(name: str) -> str:
    said = asdict(credentials_of(KEY, ClusterRole.DECODE))
    del said[name]
    return json.dumps(said)


def _with(name: str, value: object) -> str:
    return json.dumps({**asdict(credentials_of(KEY, ClusterRole.DECODE)), name: value})


BAD = [
    "",
    "{}",
    "[]",
    "null",
    "é" * 20,
    *map(_without, ("role", "nats", "token_digests", "order_keys", "signing_seed")),
    *(_with("order_keys", value) for value in ([], ["0"], [7], "00" * 32, ["00" * 31])),
    *(_with("signing_seed", value) for value in (None, "0", "zz" * 32)),
]


@pytest.mark.parametrize("text", BAD)
def test_a_file_with_anything_else_is_refused_without_being_repeated(
    text: str, tmp_path: Path
) -> None:
    path = tmp_path / "decode.json"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="not what") as refused:
        read_credentials(path)
    assert not any(secret in str(refused.value) for secret in secrets_of(ClusterRole.DECODE))


def test_a_process_takes_those_of_its_role_alone(tmp_path: Path) -> None:
    paths = write_all_credentials(tmp_path, KEY)
    given = AccessSettings(credentials_file=str(paths[ClusterRole.DECODE]))
    assert given_credentials(given, "decode") == credentials_of(KEY, ClusterRole.DECODE)
    with pytest.raises(ConfigError, match="of decode, and this is a router"):
        given_credentials(given, "router")
    assert given_credentials(AccessSettings(), "router") is None, "an open cluster"


def test_a_missing_file_and_a_folder_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_credentials(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="No such file"):
        write_credentials(
            tmp_path / "none" / "decode.json", credentials_of(KEY, ClusterRole.DECODE)
        )
