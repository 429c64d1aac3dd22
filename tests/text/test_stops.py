"""Stop strings are found for any cuts of the text, and text is held back no longer than needed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.folders import write_folder

from ferryman.cache.manifest import Exactness
from ferryman.errors import InvalidRequest
from ferryman.llm import _Answer
from ferryman.schedule.batch import Sampled
from ferryman.schedule.request import Request, SamplingParams
from ferryman.text.detokenizer import REPLACEMENT
from ferryman.text.stops import Released, StopStrings
from ferryman.text.tokenizer import Tokenizer


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


def test_an_offline_answer_whose_last_held_back_character_is_a_stop_ends_by_it(
    tmp_path: Path,
) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path / "model"))
    half = tokenizer.encode("👍")[:1]
    sampling = SamplingParams(stop=(REPLACEMENT,))
    answer = _Answer(Request("request", half, (), sampling), tokenizer)
    assert not answer.drawn(Sampled(int(half[0]), {}))
    answer.finished("length")
    completion = answer.completion(Exactness.VALUES)
    assert (completion.text, completion.finish_reason) == ("", "stop")


def test_half_a_character_is_no_stop_string() -> None:
    """At the doors no body has one; callers of the offline engine may write one."""
    with pytest.raises(InvalidRequest, match="not valid Unicode") as caught:
        SamplingParams(stop=("\ud800",))
    assert caught.value.param == "stop"
