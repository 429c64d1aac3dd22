"""The tools that agents send besides plain functions: in groups, with free text, loaded later, or
of a server. The model knows functions; the client gets calls in its own words."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.harness.router import RouterCluster, events
from tests.router.tool_folders import prompt_text, roomy_cluster, says

from ferryman_router.bodies.responses_tools import flat_name

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
NAMESPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "All agents.",
    "tools": [{**FUNCTION, "name": "spawn", "description": "One."}, {**FUNCTION, "name": "close"}],
}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
CUSTOM = {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": GRAMMAR}
SEARCH = {"type": "web_search", "external_web_access": True}
IN_GROUP = '<tool_call>{"name": "agents__spawn", "arguments": {"city": "Paris"}}</tool_call>'
FREE = (
    '<tool_call>{"name": "apply_patch", "arguments": {"input": "*** \\"Begin\\"\\n"}}</tool_call>'
)
USER = {"role": "user", "content": "hi"}
NOT_HELD = "told to the model, and enforced where tool_choice names the tool"


@pytest.fixture
async def calling(nats_url: str, tmp_path: Path) -> AsyncIterator[RouterCluster]:
    async with roomy_cluster(nats_url, tmp_path, IN_GROUP) as made:
        yield made


async def _respond(cluster: RouterCluster, **more: Any) -> Any:
    body = {"input": "hi", "tools": [NAMESPACE, CUSTOM, SEARCH], "max_output_tokens": 200, **more}
    response = await cluster.post(RESPONSES, **body)
    assert response.status_code == 200, response.text
    return response


async def test_a_function_of_a_namespace_is_called_apart(calling: RouterCluster) -> None:
    response = await _respond(calling)
    found = response.json()
    (call,) = found["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "agents", "spawn")
    assert json.loads(call["arguments"]) == {"city": "Paris"}
    assert [tool["type"] for tool in found["tools"]] == ["namespace", "custom"]
    assert found["tools"] == [NAMESPACE, CUSTOM]
    ignored = response.headers["x-ferryman-ignored"]
    assert ignored == "tools[2] of type web_search, tools[1].format"
    assert found["usage"]["ferryman"]["ignored"] == [
        "tools[2] of type web_search (tools are called by the client)",
        f"tools[1].format ({NOT_HELD})",
    ]
    told = events((await _respond(calling, stream=True)).text)
    added = next(event for event in told if event["type"] == "response.output_item.added")
    assert (added["item"]["namespace"], added["item"]["name"]) == ("agents", "spawn")
    done = next(e for e in told if e["type"] == "response.function_call_arguments.done")
    assert done["name"] == "spawn"
    ids = [item["call_id"] for item in told[-1]["response"]["output"]]
    assert ids == [added["item"]["call_id"]]


async def test_the_model_sees_functions_alone(calling: RouterCluster) -> None:
    await _respond(calling)
    head = prompt_text(calling).partition("with one of ")[2].partition("</s>")[0]
    spawn, close, patch = (tool["function"] for tool in json.loads(head))
    assert (spawn["name"], close["name"]) == ("agents__spawn", "agents__close")
    assert spawn["description"] == "All agents.\n\nOne."
    assert spawn["parameters"] == SCHEMA
    assert patch["description"] == 'Patches.\n\nThe input has this form (lark):\nstart: "x"'
    assert patch["parameters"]["required"] == ["input"]


@pytest.mark.parametrize("form", [{}, {"format": {"type": "text"}}], ids=["none", "text"])
async def test_a_custom_tool_of_free_text_is_told_as_it_is(
    calling: RouterCluster, form: dict[str, Any]
) -> None:
    tool = {"type": "custom", "name": "say", "description": "Says it.", **form}
    await _respond(calling, tools=[tool])
    head = prompt_text(calling).partition("with one of ")[2].partition("</s>")[0]
    (say,) = (told["function"] for told in json.loads(head))
    assert say["description"] == "Says it."


async def test_a_custom_tool_gets_free_text(calling: RouterCluster) -> None:
    says(calling, FREE)
    (call,) = (await _respond(calling)).json()["output"]
    wanted = ("custom_tool_call", "apply_patch", '*** "Begin"\n')
    assert (call["type"], call["name"], call["input"]) == wanted
    assert call["id"].startswith("ctc_")
    told = events((await _respond(calling, stream=True)).text)
    deltas = [e["delta"] for e in told if e["type"] == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 4, "the input is streamed as it comes"
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    (done,) = [e for e in told if e["type"] == "response.custom_tool_call_input.done"]
    assert ("".join(deltas), done["input"]) == (wanted[2], wanted[2])
    assert not [e for e in told if "function_call_arguments" in e["type"]]
    (item,) = told[-1]["response"]["output"]
    assert (item["type"], item["input"], done["item_id"]) == (wanted[0], wanted[2], item["id"])


async def test_a_custom_tool_that_is_cut_off_shows_how_far_it_came(calling: RouterCluster) -> None:
    says(calling, FREE)
    num_tokens = len(calling.decodes[0].script) - 22
    found = (await _respond(calling, max_output_tokens=num_tokens)).json()
    assert found["status"] == "incomplete"
    (call,) = found["output"]
    assert call["type"] == "custom_tool_call"
    assert call["input"]
    assert '*** "Begin"\n'.startswith(call["input"]), "no JSON, and nothing that did not come"


DEMANDED = {"type": "custom", "name": "apply_patch"}


@pytest.mark.parametrize("is_grouped", [False, True], ids=["alone", "of a namespace"])
@pytest.mark.parametrize(
    ("syntax", "definition", "kind"),
    [("lark", 'start: /[^"]+/ "\\n"', "grammar"), ("regex", r"\*\*\* [^\n]+\n", "regex")],
    ids=["lark", "regex"],
)
async def test_a_demanded_custom_tool_is_held_to_its_grammar(
    calling: RouterCluster, syntax: str, definition: str, kind: str, is_grouped: bool
) -> None:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    tool, choice = {**CUSTOM, "format": form}, dict(DEMANDED)
    tools = [NAMESPACE, tool]
    if is_grouped:
        choice["namespace"] = "files"
        tools = [FUNCTION, {**NAMESPACE, "name": "files", "tools": [tool]}]
    says(calling, "*** Begin é\n")
    response = await _respond(calling, tools=tools, tool_choice=choice)
    (call,) = response.json()["output"]
    assert (call["type"], call["name"], call["input"]) == (
        "custom_tool_call",
        "apply_patch",
        "*** Begin é\n",
    )
    grammar = calling.prefills[0].orders[-1].request.sampling.grammar
    assert grammar is not None
    assert (grammar.kind.value, grammar.text) == (kind, definition)
    assert "x-ferryman-ignored" not in response.headers
    told = events((await _respond(calling, tools=tools, tool_choice=choice, stream=True)).text)
    deltas = [e["delta"] for e in told if e["type"] == "response.custom_tool_call_input.delta"]
    assert ("".join(deltas), len(deltas) > 2) == ("*** Begin é\n", True)


async def test_a_demanded_custom_tool_that_is_cut_off_is_incomplete(calling: RouterCluster) -> None:
    says(calling, "xxxxxxxx")
    asked = {"tool_choice": DEMANDED, "tools": [{**CUSTOM, "format": REGEX}]}
    found = (await _respond(calling, max_output_tokens=3, **asked)).json()
    assert (found["status"], found["output"][0]["input"]) == ("incomplete", "xxx")


REGEX = {"type": "grammar", "syntax": "regex", "definition": "x+"}


@pytest.mark.parametrize(
    ("form", "choice", "is_noted"),
    [
        (REGEX, "auto", True),
        (REGEX, "required", False),
        (REGEX, "none", False),
        (GRAMMAR, "required", True),
        ({"type": "text"}, "auto", False),
        (REGEX, {"type": "function", "name": "get_weather"}, False),
    ],
    ids=["auto", "a regex demanded", "none", "Lark demanded", "text", "another tool"],
)
async def test_a_grammar_that_is_not_enforced_is_noted(
    calling: RouterCluster, form: Any, choice: Any, is_noted: bool
) -> None:
    says(calling, "hi")
    tools = [FUNCTION, {**CUSTOM, "format": form}]
    response = await _respond(calling, tools=tools, tool_choice=choice)
    noted = response.json()["usage"]["ferryman"].get("ignored", [])
    assert noted == ([f"tools[1].format ({NOT_HELD})"] if is_noted else [])


async def test_a_regex_is_the_pattern_of_a_call_that_is_demanded(calling: RouterCluster) -> None:
    says(calling, '[{"name": "apply_patch", "parameters": {"input": "xx"}}]')
    tools = [FUNCTION, {**CUSTOM, "format": REGEX}]
    found = (await _respond(calling, tools=tools, tool_choice="required")).json()
    assert [call["input"] for call in found["output"]] == ["xx"]
    grammar = calling.prefills[0].orders[-1].request.sampling.grammar
    assert grammar is not None
    assert '"pattern": "^(?:x+)$"' in grammar.text


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"type": "grammar", "definition": "x"}, "format.syntax"),
        ({"type": "grammar", "syntax": "ebnf", "definition": "x"}, "format.syntax"),
        ({"type": "grammar", "syntax": "regex"}, "format.definition"),
        ({"type": "grammar", "syntax": "regex", "definition": "x" * 70_000}, "format.definition"),
        ({"type": "json"}, "format.type"),
    ],
    ids=["no syntax", "another syntax", "no definition", "too long", "another type"],
)
async def test_a_form_of_input_that_is_none_is_refused_by_name(
    calling: RouterCluster, form: Any, field: str
) -> None:
    body = {"input": "hi", "tools": [{**CUSTOM, "format": form}]}
    refused = await calling.post(RESPONSES, **body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, f"tools[0].{field}")


@pytest.mark.parametrize(
    "form",
    [
        {"type": "grammar", "syntax": "regex", "definition": "a(?=b)"},
        {"type": "grammar", "syntax": "lark", "definition": "start: nothing"},
    ],
    ids=["regex", "lark"],
)
async def test_a_demanded_grammar_that_cannot_be_held_is_refused(
    calling: RouterCluster, form: Any
) -> None:
    body = {"input": "hi", "tools": [{**CUSTOM, "format": form}], "tool_choice": DEMANDED}
    refused = await calling.post(RESPONSES, **body)
    assert refused.status_code == 400
    assert "cannot be served" in refused.json()["error"]["message"]
    assert (await calling.post(RESPONSES, **{**body, "tool_choice": "auto"})).status_code == 200


@pytest.mark.parametrize(
    ("choice", "said", "kind", "name"),
    [
        (
            {"type": "function", "namespace": "agents", "name": "close"},
            '{"city": "Rome"}',
            "function_call",
            "close",
        ),
        (
            {"type": "custom", "name": "apply_patch"},
            '{"input": "x"}',
            "custom_tool_call",
            "apply_patch",
        ),
    ],
    ids=["of a namespace", "custom"],
)
async def test_a_call_of_either_kind_can_be_demanded(
    calling: RouterCluster, choice: dict[str, str], said: str, kind: str, name: str
) -> None:
    says(calling, said)
    found = (await _respond(calling, tool_choice=choice)).json()
    assert [(item["type"], item["name"]) for item in found["output"]] == [(kind, name)]
    assert found["tool_choice"] == choice


async def test_calls_come_back_by_the_names_that_the_model_knows(calling: RouterCluster) -> None:
    given = {"type": "function_call", "call_id": "a", "namespace": "agents", "name": "spawn"}
    free = {"type": "custom_tool_call", "call_id": "b", "name": "apply_patch", "input": "x\n"}
    history = [
        {"role": "user", "content": "hi"},
        {**given, "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "a", "output": "done"},
        free,
        {"type": "custom_tool_call_output", "call_id": "b", "output": "patched"},
    ]
    await _respond(calling, input=history)
    prompt = prompt_text(calling)
    assert '<tool_call>agents__spawn([["city", "Rome"]])' in prompt
    assert '<tool_call>apply_patch([["input", "x\\n"]])' in prompt
    assert "<|tool|>done[a]" in prompt
    assert "<|tool|>patched[b]" in prompt


def test_a_flat_name_is_made_as_codex_makes_it() -> None:
    assert flat_name("mcp__x__", "y") == "mcp__x__y"
    assert flat_name("a", "_b") == "a_b"
    assert flat_name("a", "b") == "a__b"
    assert flat_name("", "b") == "b"


# Anthropic.

LATE = {"name": "late_one", "input_schema": SCHEMA, "defer_loading": True}
TOOLS: list[dict[str, Any]] = [
    {
        "name": "get_weather",
        "input_schema": SCHEMA,
        "eager_input_streaming": True,
        "allowed_callers": ["direct"],
        "input_examples": [{"city": "Rome"}],
        "strict": True,
    },
    LATE,
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
    {"type": "mcp_toolset", "mcp_server_name": "x"},
]
KEEPS = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


async def _message(cluster: RouterCluster, **more: Any) -> Any:
    body = {"messages": [USER], "tools": TOOLS, "max_tokens": 100, **more}
    response = await cluster.post(MESSAGES, **body)
    assert response.status_code == 200, response.text
    return response


def _names(cluster: RouterCluster) -> list[str]:
    head = prompt_text(cluster).partition("with one of ")[2].partition("</s>")[0]
    return [tool["function"]["name"] for tool in json.loads(head)]


async def test_a_deferred_tool_is_told_of_when_the_conversation_refers_to_it(
    calling: RouterCluster,
) -> None:
    response = await _message(calling)
    assert _names(calling) == ["get_weather"]
    assert response.headers["x-ferryman-ignored"] == (
        "tools[2] of type web_search_20250305, tools[3] of type mcp_toolset"
    )
    found = {"type": "tool_reference", "tool_name": "late_one"}
    used = {"type": "tool_use", "id": "c1", "name": "ToolSearch", "input": {}}
    history = [
        USER,
        {"role": "assistant", "content": [used]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [found]}],
        },
    ]
    await _message(calling, messages=history)
    assert _names(calling) == ["get_weather", "late_one"]
    assert "<|tool|>late_one[c1]" in prompt_text(calling)


@pytest.mark.parametrize("management", [KEEPS, {"edits": []}, {}])
async def test_edits_that_keep_all_are_applied_as_none(
    calling: RouterCluster, management: dict[str, Any]
) -> None:
    says(calling, "Well.")
    asked = {"context_management": management}
    applied: dict[str, Any] = {"applied_edits": []}
    assert (await _message(calling, **asked)).json()["context_management"] == applied
    told = events((await _message(calling, **asked, stream=True)).text)
    assert told[-2]["type"] == "message_delta"
    assert told[-2]["context_management"] == applied
    assert "context_management" not in (await _message(calling)).json()


async def test_a_client_may_ask_whether_there_is_a_server(calling: RouterCluster) -> None:
    response = await calling.http.head("/")
    assert response.status_code == 200
    assert response.content == b""


async def test_the_client_of_openai_reads_calls_of_both_kinds(calling: RouterCluster) -> None:
    openai = pytest.importorskip("openai", reason="the extra `clients` has it")
    says(calling, IN_GROUP + FREE)
    base_url = f"{calling.http.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
        asked = {"model": "tiny", "input": "hi", "tools": [NAMESPACE, CUSTOM]}
        async with client.responses.stream(**asked, max_output_tokens=300) as stream:
            names = {event.type async for event in stream}
            found = await stream.get_final_response()
    first, second = found.output
    assert (first.type, first.namespace, first.name) == ("function_call", "agents", "spawn")
    assert (second.type, second.input) == ("custom_tool_call", '*** "Begin"\n')
    assert {type(tool).__name__ for tool in found.tools} == {"NamespaceTool", "CustomTool"}
    assert "response.custom_tool_call_input.delta" in names
