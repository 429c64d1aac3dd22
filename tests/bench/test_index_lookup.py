"""The bench of the index finds the units that it put there; its times are not tested."""

from __future__ import annotations

from ferryman_bench.transport.index_lookup import EARLY_PAGE, measure_lookups


def test_lookups_find_the_snapshot_that_was_put_there() -> None:
    found = measure_lookups(page_counts=(300,), num_nodes=2, repeats=2)
    assert [(one.num_pages, one.num_nodes, one.snapshot) for one in found] == [
        (300, 2, "end"),
        (300, 2, "early"),
    ]
    assert [one.usable_pages for one in found] == [300, EARLY_PAGE]
    assert all(0 < one.least <= one.median for one in found)
