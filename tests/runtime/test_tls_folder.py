"""Certificates are made for every role, read again when they change, refused by file and day."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from tests.certificates import make_certificates

from ferryman.errors import ConfigError
from ferryman.runtime.access import given_tls
from ferryman.security.certificates import SERVERS, certificate_specs
from ferryman.security.credentials import ClusterRole
from ferryman.security.tls import SERVICE_NAME
from ferryman.security.tls_folder import TlsFolder
from ferryman.settings.groups import AccessSettings

NOW = datetime(2026, 5, 1, tzinfo=UTC)
NAMES = (*(role.value for role in ClusterRole), *SERVERS)
DAY = timedelta(days=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_certificates(tmp_path / "tls", now=NOW)


def loaded(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def authorities(folder: Path) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates((folder / "ca.crt").read_bytes())


def reading(folder: Path, name: str = "decode", now: datetime = NOW) -> TlsFolder:
    return TlsFolder(folder, name, lambda: now)


def refusal(folder: Path, now: datetime = NOW) -> str:
    with pytest.raises(ConfigError) as caught:
        reading(folder, now=now)
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_certificate_says_its_role_and_its_key_is_the_owners_alone(
    folder: Path, name: str
) -> None:
    certificate, (authority,) = loaded(folder / f"{name}.crt"), authorities(folder)
    certificate.verify_directly_issued_by(authority)
    (common,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    assert common.value == name
    assert (folder / f"{name}.key").stat().st_mode & 0o777 == 0o600
    assert reading(folder, name)().certificate == (folder / f"{name}.crt").read_bytes()


def test_observers_serve_nothing_and_servers_of_clients_are_no_services(folder: Path) -> None:
    def uses(name: str) -> set[x509.ObjectIdentifier]:
        extensions = loaded(folder / f"{name}.crt").extensions
        return set(extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)

    def hosts(name: str) -> list[str]:
        extensions = loaded(folder / f"{name}.crt").extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return names.get_values_for_type(x509.DNSName)

    assert uses("observer") == {ExtendedKeyUsageOID.CLIENT_AUTH}
    assert uses("door") == uses("nats") == {ExtendedKeyUsageOID.SERVER_AUTH}
    assert hosts("door") == ["localhost"]
    assert hosts("decode") == [SERVICE_NAME]


def test_again_it_makes_new_certificates_under_the_same_authority(folder: Path) -> None:
    old, (authority,) = loaded(folder / "decode.crt"), authorities(folder)
    make_certificates(folder, now=NOW + DAY)
    new = loaded(folder / "decode.crt")
    assert authorities(folder) == [authority]
    new.verify_directly_issued_by(authority)
    assert new.serial_number != old.serial_number
    assert new.public_key() != old.public_key()


def test_a_new_authority_signs_and_the_old_one_stays_trusted_until_it_expires(folder: Path) -> None:
    (old,) = authorities(folder)
    make_certificates(folder, now=NOW + DAY, new_ca=True)
    new, also = authorities(folder)
    assert also == old
    loaded(folder / "door.crt").verify_directly_issued_by(new)
    make_certificates(folder, now=old.not_valid_after_utc, new_ca=True)
    assert old not in authorities(folder)
    assert new in authorities(folder)


def test_an_authority_without_its_key_signs_nothing(folder: Path) -> None:
    (folder / "ca.key").unlink()
    with pytest.raises(ConfigError, match=r"ca\.key.*--new-ca"):
        make_certificates(folder, now=NOW)


@pytest.mark.parametrize("host", ["", "a b", "http://x", "x:1", "a..b", "é"])
def test_a_host_is_a_name_or_an_address(host: str) -> None:
    with pytest.raises(ConfigError, match="neither a name nor an address"):
        certificate_specs((host,))


def test_files_are_read_again_when_they_change_and_only_then(folder: Path) -> None:
    source = reading(folder)
    first = source()
    assert source() is first
    make_certificates(folder, now=NOW)
    assert source() is not first
    assert source().certificate == (folder / "decode.crt").read_bytes()
    assert source() is source()


def test_half_of_a_pair_changes_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = reading(folder)
    first, other = source(), make_certificates(folder.with_name("other"), now=NOW)
    shutil.copy(other / "decode.crt", folder / "decode.crt")
    assert source() is first
    assert "not the key of" in caplog.text
    shutil.copy(other / "decode.key", folder / "decode.key")
    assert source().key == (other / "decode.key").read_bytes()


def test_files_that_become_good_without_a_change_are_read_a_minute_later(folder: Path) -> None:
    times = [NOW]
    source = TlsFolder(folder, "decode", lambda: times[-1])
    first, key = source(), folder / "decode.key"
    make_certificates(folder, now=NOW)
    key.chmod(0o644)
    assert source() is first
    key.chmod(0o600)  # as the error says; no file is newer for it
    times.append(NOW + timedelta(seconds=59))
    assert source() is first
    times.append(NOW + timedelta(seconds=60))
    renewed = source()
    assert renewed.key == key.read_bytes() != first.key
    times.append(NOW + DAY)
    assert source() is renewed


def test_a_certificate_that_came_before_its_time_is_used_when_the_clock_is_right(
    folder: Path,
) -> None:
    times = [NOW]
    source = TlsFolder(folder, "decode", lambda: times[-1])
    first = source()
    make_certificates(folder, now=NOW + DAY)
    assert source() is first
    times.append(NOW + DAY)
    assert source().certificate == (folder / "decode.crt").read_bytes() != first.certificate


def test_expiry_is_told_with_file_and_day(folder: Path) -> None:
    said = refusal(folder, NOW + 30 * DAY)
    assert f"{folder}/decode.crt: it expired on 2026-05-31 00:00 UTC" in said
    assert "ferryman certs" in said
    assert "not valid before 2026-04-30 23:55 UTC" in refusal(folder, NOW - DAY)


def test_the_last_days_of_a_certificate_are_told_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    times = [NOW]
    source = TlsFolder(folder, "decode", lambda: times[-1])
    for days in (0, 22.9):
        times.append(NOW + days * DAY)
        source()
    assert not caplog.records
    for days in (23.1, 23.2, 31):
        times.append(NOW + days * DAY)
        source()
    (told,) = caplog.messages
    assert f"{folder}/decode.crt: it expires on 2026-05-31 00:00 UTC" in told
    make_certificates(folder, now=times[-1], days=3)
    source()
    source()
    (again,) = caplog.messages[1:]
    assert f"{folder}/decode.crt: it expires on 2026-06-04 00:00 UTC" in again


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o602, 0o601])
def test_a_key_that_others_may_read_or_change_is_refused(folder: Path, mode: int) -> None:
    (folder / "decode.key").chmod(mode)
    assert f"chmod 600 {folder}/decode.key" in refusal(folder)


def test_a_group_may_read_a_key_as_kubernetes_has_it(folder: Path) -> None:
    (folder / "decode.key").chmod(0o440)
    reading(folder)


@pytest.mark.parametrize("file", ["ca.crt", "decode.crt", "decode.key"])
def test_a_file_that_is_missing_or_something_else_is_named(folder: Path, file: str) -> None:
    (folder / file).write_bytes(b"something else")
    assert file in refusal(folder)
    (folder / file).unlink()
    assert file in refusal(folder)
    assert "No such file" in refusal(folder)


def test_tls_wants_credentials(folder: Path) -> None:
    assert given_tls(AccessSettings(), "decode") is None
    with pytest.raises(ConfigError, match="CREDENTIALS_FILE"):
        given_tls(AccessSettings(tls_dir=str(folder)), "decode")
