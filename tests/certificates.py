"""Folders of certificates for tests."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from ferryman.runtime.certificates import certificate_specs, write_certificates


def make_certificates(
    folder: Path, *, now: datetime | None = None, days: int = 30, new_ca: bool = False
) -> Path:
    """All certificates of a cluster, with an authority of this folder's own."""
    folder.mkdir(exist_ok=True)
    specs = certificate_specs(())
    write_certificates(folder, specs, days, now or datetime.now(UTC), new_ca=new_ca)
    return folder


def forget_older_authorities(folder: Path) -> None:
    """From now on the newest authority alone is trusted."""
    path, end = folder / "ca.crt", "-----END CERTIFICATE-----\n"
    path.write_text(path.read_text().split(end)[0] + end)
