"""The tables of docs/models.md say what the families and the published configs say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ferryman.model.families import FAMILIES
from ferryman.model.nearest_family import DOCUMENT
from tools import model_tables


def test_the_page_has_the_tables_that_are_declared() -> None:
    page = model_tables.PAGE.read_text()
    assert model_tables.written(page) == page, "run `python tools/model_tables.py`"


def test_every_family_has_a_row_that_says_what_it_is() -> None:
    rows = model_tables.family_rows([])
    assert len(rows) == len(FAMILIES)
    assert {name for row in rows for name in row[3].split(", ")} == {
        f"`{name}`" for family in FAMILIES for name in family.architectures
    }


def test_every_family_that_transformers_has_is_in_the_table_of_differences() -> None:
    rows = model_tables.difference_rows()
    names = {family.name for family in FAMILIES} - {"native"}
    assert {row[0] for row in rows} == {f"`{name}`" for name in names}


def test_a_difference_above_what_is_allowed_is_in_no_row() -> None:
    for row in model_tables.difference_rows():
        assert float(row[3]) < 2e-4, row
        assert float(row[4]) < 1e-12, row


def test_the_published_models_are_those_that_are_read() -> None:
    document = model_tables.published_document(model_tables.read_configs())
    assert DOCUMENT.read_text() == document, "run `python tools/model_tables.py`"


def test_a_stale_row_is_noticed() -> None:
    page = model_tables.PAGE.read_text()
    stale = page.replace("| `Qwen/Qwen3-8B` |", "| `Qwen/Qwen2-8B` |")
    assert stale != page
    assert model_tables.written(stale) == page


def test_a_page_without_a_marker_is_refused() -> None:
    page = model_tables.PAGE.read_text().replace("<!-- models: published -->", "")
    with pytest.raises(ValueError, match="table of published"):
        model_tables.written(page)


def test_a_config_in_a_file_of_another_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"model": "a/b", "source": "", "unused": [], "config": {}}
    (tmp_path / "a--c.json").write_text(json.dumps(found))
    monkeypatch.setattr(model_tables, "PUBLISHED", tmp_path)
    with pytest.raises(ValueError, match=r"a--c.json is the config of a/b"):
        model_tables.published_configs()
