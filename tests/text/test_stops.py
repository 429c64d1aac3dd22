"""Stop strings are found wherever pieces are cut, and nothing is held back longer than needed."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ferryman.text.stops import Released, StopStrings


def _run(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, str | None]:
    watcher, shown = StopStrings(stops), ""
    for piece in pieces:
        released = watcher.feed(piece)
        shown += released.text
        if released.stop is not None:
            return shown, released.stop
    return shown + watcher.flush(), None


def test_a_stop_string_across_pieces_ends_the_text_before_it() -> None:
    assert _run(("END",), ["abc E", "N", "D more"]) == ("abc ", "END")


def test_what_may_begin_a_stop_string_is_held_back_no_longer_than_needed() -> None:
    watcher = StopStrings(("END",))
    assert watcher.feed("aE") == Released("a")
    assert watcher.feed("N") == Released("")
    assert watcher.feed("x") == Released("ENx")
    assert watcher.feed("EE") == Released("E")


def test_the_string_that_is_whole_first_wins() -> None:
    assert _run(("abcd", "bc"), ["xabcd"]) == ("xa", "bc")


def test_an_unfinished_stop_string_is_shown_at_the_end() -> None:
    assert _run(("END",), ["an EN"]) == ("an EN", None)


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple)


@given(stops=STOPS, text=st.text("ab", max_size=20), cuts=st.lists(st.integers(0, 20), max_size=6))
def test_the_result_does_not_depend_on_where_pieces_are_cut(
    stops: tuple[str, ...], text: str, cuts: list[int]
) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert _run(stops, pieces) == _run(stops, list(text)) == _run(stops, [text])
