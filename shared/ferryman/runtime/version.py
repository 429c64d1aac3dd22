"""The version of the package that runs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

UNPACKAGED = "0+unpackaged"
"""The version of a tree that is on the path without being installed."""


def package_version() -> str:
    try:
        return version("ferryman")
    except PackageNotFoundError:
        return UNPACKAGED
