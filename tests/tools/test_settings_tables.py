"""The tables of settings in docs/operating.md are those that the code declares."""

from __future__ import annotations

import pytest

from tools import settings_tables


def test_the_page_has_the_tables_that_are_declared() -> None:
    page = settings_tables.PAGE.read_text()
    assert settings_tables.written(page) == page, "run `python tools/settings_tables.py`"


def test_every_setting_says_what_it_means() -> None:
    silent = [
        name
        for found in settings_tables.tables().values()
        for name, _, meaning in found
        if not meaning
    ]
    assert not silent


def test_a_stale_default_is_noticed() -> None:
    page = settings_tables.PAGE.read_text()
    stale = page.replace("| `MAX_QUEUED` | `1024` |", "| `MAX_QUEUED` | `99` |")
    assert stale != page
    assert settings_tables.written(stale) == page


def test_a_page_without_a_marker_is_refused() -> None:
    page = settings_tables.PAGE.read_text().replace("<!-- settings: router -->", "")
    with pytest.raises(ValueError, match="settings of router"):
        settings_tables.written(page)
