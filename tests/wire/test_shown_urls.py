"""URLs as logs show them."""

from __future__ import annotations

import pytest

from ferryman.security.shown_urls import without_logins


@pytest.mark.parametrize(
    ("urls", "shown"),
    [
        ("nats://a:4222", "nats://a:4222"),
        ("nats://me:hidden@a:4222", "nats://a:4222"),
        ("nats://hidden@a:4222, tls://hid:den@b:1", "nats://a:4222,tls://b:1"),
        ("redis://:hid@den@a:6379/0", "redis://a:6379/0"),
        ("unix:///run/redis@1.sock", "unix:///run/redis@1.sock"),
        ("me:hidden@a", "a"),
        ("", ""),
    ],
)
def test_a_url_is_shown_without_its_login(urls: str, shown: str) -> None:
    assert without_logins(urls) == shown
