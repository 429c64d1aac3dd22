"""Ids of Kimi name the tool whose name they have, also where another tool's name is in it."""

from __future__ import annotations

import pytest
from tests.text.tool_calls.samples import read
from tests.text.tool_calls.sloppy_kimi import ARGUMENTS, CALL, CALL_END

from ferryman.text.tool_calls.formats import FreeTools


@pytest.mark.parametrize(
    ("names", "call_id", "name"),
    [
        (("list", "list_functions"), "list_functions", "list_functions"),
        (("list", "list_functions"), "list_functions_2", "list_functions"),
        (("list", "list_functions"), "functions_list_functions_2", "list_functions"),
        (("get", "get_functions"), "get_functions_1", "get_functions"),
        (("_1", "get_functions_1"), "get_functions_1", "get_functions_1"),
        (("now", "functions_now"), "functions_now", "functions_now"),
        (("now", "functions_now"), "functions_now_1", "now"),
        (("f", "f_1"), "f_1", "f_1"),
    ],
)
def test_an_id_names_one_tool(names: tuple[str, ...], call_id: str, name: str) -> None:
    use = FreeTools({each: {} for each in names})
    text = f'{CALL}{call_id}{ARGUMENTS}{{"a": "1"}}{CALL_END}'
    assert read("kimi_k2", [text], use=use).calls == ((name, '{"a": "1"}'),)


@pytest.mark.parametrize(
    ("name", "call_id"), [("list", "list_functions"), ("get", "get_functions_1")]
)
def test_an_id_of_no_tool_calls_none(name: str, call_id: str) -> None:
    text = f'{CALL}{call_id}{ARGUMENTS}{{"a": "1"}}{CALL_END}'
    answer = read("kimi_k2", [text], use=FreeTools({name: {}}))
    assert (answer.calls, answer.content) == ((), text)
