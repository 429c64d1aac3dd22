"""The context for the NATS command line: the fields that the tool reads, and private files."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from ferryman_launcher.cluster_locks import nats_context, write_nats_context

# All fields that `nats context` knows with a meaning for us, by their names in its source.
KNOWN = {"description", "url", "user", "password", "inbox_prefix", "creds", "token", "nkey", "ca"}


@pytest.mark.parametrize(
    ("url", "bare", "login", "prefix"),
    [
        (
            "nats://observer:abc@127.0.0.1:4222",
            "nats://127.0.0.1:4222",
            ["observer", "abc"],
            "_INBOX.observer",
        ),
        ("nats://127.0.0.1:4222", "nats://127.0.0.1:4222", ["", ""], "_INBOX"),
        ("tls://o:p%40q@a:1, tls://o:p%40q@b:2", "tls://a:1,tls://b:2", ["o", "p@q"], "_INBOX.o"),
    ],
    ids=["ours", "open", "two of others"],
)
def test_a_context_has_url_login_and_inboxes(
    url: str, bare: str, login: list[str], prefix: str
) -> None:
    said = json.loads(nats_context(url, "a cluster"))
    assert set(said) <= KNOWN
    assert said["url"] == bare
    assert [said["user"], said["password"]] == login
    assert said["inbox_prefix"] == prefix


def test_it_lies_where_the_tool_looks_and_is_its_owner_s_alone(tmp_path: Path) -> None:
    """With `XDG_CONFIG_HOME` naming the folder around `nats`."""
    folder = tmp_path / "nats"
    folder.mkdir()
    for _ in range(2):
        write_nats_context(folder, "nats://observer:abc@127.0.0.1:4222", "a cluster")
    path = folder / "context" / "ferryman.json"
    assert (folder / "context.txt").read_text() == "ferryman"
    assert json.loads(path.read_text())["user"] == "observer"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
