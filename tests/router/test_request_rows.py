"""Rows of requests that ended are bounded, in all and for each tenant."""

from __future__ import annotations

import pytest

from ferryman_router.request.request_rows import EndedRows, RequestRow


def row(tenant: str, number: int) -> RequestRow:
    return RequestRow(
        f"{tenant}-{number}", "", tenant, 0.0, "finished", 1, 9, 3, "p", "d", {}, {}, "stop", 1.0
    )


def ids(rows: EndedRows, tenant: str | None) -> list[str]:
    return [row.request_id for row in rows.latest_first(tenant)]


def test_the_latest_rows_are_kept_and_come_first() -> None:
    rows = EndedRows(max_rows=3, max_of_tenant=3)
    for number in range(5):
        rows.add(row("shop", number))
    assert ids(rows, "shop") == ids(rows, None) == ["shop-4", "shop-3", "shop-2"]


def test_a_busy_tenant_takes_no_more_than_its_part() -> None:
    rows = EndedRows(max_rows=4, max_of_tenant=2)
    rows.add(row("lab", 0))
    for number in range(9):
        rows.add(row("shop", number))
    assert ids(rows, "lab") == ["lab-0"]
    assert ids(rows, "shop") == ["shop-8", "shop-7"]


def test_all_together_are_bounded_too() -> None:
    rows = EndedRows(max_rows=4, max_of_tenant=2)
    for number in range(6):
        rows.add(row(f"tenant{number}", 0))
    assert (len(rows), ids(rows, "tenant0")) == (4, [])


def test_a_request_that_ends_again_under_its_id_has_one_row() -> None:
    rows = EndedRows(max_rows=4, max_of_tenant=4)
    for number in (0, 1, 0):
        rows.add(row("shop", number))
    assert ids(rows, "shop") == ["shop-0", "shop-1"]


@pytest.mark.parametrize(("tenant", "is_there"), [("shop", True), ("lab", False), (None, True)])
def test_a_row_is_found_by_its_own_tenant_alone(tenant: str | None, *, is_there: bool) -> None:
    rows = EndedRows()
    rows.add(row("shop", 1))
    assert (rows.get(tenant, "shop-1") is not None) is is_there
