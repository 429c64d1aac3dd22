"""`ferryman verify` against a running cluster finds the bits that Ferryman promises."""

from __future__ import annotations

import json

import pytest

from ferryman_cli.app import run


def test_a_cluster_answers_with_the_same_bits_cold_and_warm(
    base_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(["verify", base_url, "--requests", "120", "--fillers", "2", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert status == 0
    assert report["cold"] == "a new cache_salt"
    assert report["summary"].startswith("bits: ")
    reusing = {way["way"] for way in report["ways"] if way["reusing"]}
    assert {"asked again", "in a third turn"} <= reusing
