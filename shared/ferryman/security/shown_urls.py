"""URLs of servers for logs and errors: one may have a password, or a token in its place."""

from __future__ import annotations


def without_logins(urls: str) -> str:
    """Some URLs with commas between, whatever else may be wrong with them, without their logins."""
    return ",".join(_without_login(url.strip()) for url in urls.split(","))


def _without_login(url: str) -> str:
    scheme, separator, rest = url.rpartition("://")
    place, slash, path = rest.partition("/")
    return scheme + separator + place.rpartition("@")[2] + slash + path
