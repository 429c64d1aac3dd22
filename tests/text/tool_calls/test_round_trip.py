"""A call that was read is rendered, by a template of its model's layout, as the model wrote it: so
the next turn's prompt begins with the very text of this one.

The templates are small ones of ours in the layout of the published ones; the texts stand as those
render them.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
from tests.text.tool_calls.samples import gathered

from ferryman.text.chat import ChatTemplate
from ferryman.text.tool_calls.call_ids import CallIds, CallSource
from ferryman.text.tool_calls.deltas import CallStarted
from ferryman.text.tool_calls.formats import FreeTools, OutputSyntax
from ferryman.text.tool_calls.thought import PromptTail
from ferryman.text.tool_calls.value_types import parameter_types

USE = FreeTools(
    {
        "read": parameter_types(
            {
                "properties": {
                    "path": {"type": "string"},
                    "lines": {"type": "array", "items": {"type": "integer"}},
                    "is_whole": {"type": "boolean"},
                    "at": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                }
            }
        ),
        "now": parameter_types({"properties": {}}),
    }
)


class Layout(NamedTuple):
    """A template in the layout of a model, and a turn of the assistant as that has it."""

    template: str
    written: str


_TURN = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}"
_CALLS = "{% for call in m.tool_calls %}{% set f = call.function %}"

LAYOUTS = {
    "Kimi K2": Layout(
        _TURN + "<|tool_calls_section_begin|>{% for call in m.tool_calls %}<|tool_call_begin|>"
        "{{ call['id'] }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}"
        "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endfor %}",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.read:0"
        '<|tool_call_argument_begin|>{"path": "a", "lines": [1, 2], "at": null}<|tool_call_end|>'
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
    ),
    "MiniMax M2": Layout(
        _TURN
        + "{{ '\\n<minimax:tool_call>\\n' }}"
        + _CALLS
        + "{{ '<invoke name=\"' + f.name + '\">\\n' }}"
        "{% for k, v in f.arguments.items() %}{{ '<parameter name=\"' + k + '\">' }}"
        "{{ (v if v is string else v | tojson) + '</parameter>\\n' }}{% endfor %}"
        "{{ '</invoke>\\n' }}{% endfor %}</minimax:tool_call>{% endfor %}",
        'I look.\n<minimax:tool_call>\n<invoke name="read">\n'
        '<parameter name="path"> a\n</parameter>\n'
        '<parameter name="lines">[1, 2]</parameter>\n<parameter name="at">{"x": null}</parameter>\n'
        '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    ),
    "DeepSeek V3.2": Layout(
        "{% set w = '｜DSML｜' %}"
        + _TURN
        + "{{ '\\n\\n<' + w + 'function_calls>\\n' }}"
        + _CALLS
        + "{{ '<' + w + 'invoke name=\"' + f.name + '\">\\n' }}"
        "{% for k, v in f.arguments.items() %}"
        "{{ '<' + w + 'parameter name=\"' + k + '\" string=\"' + (v is string) | tojson + '\">' }}"
        "{{ (v if v is string else v | tojson) + '</' + w + 'parameter>\\n' }}{% endfor %}"
        "{{ '</' + w + 'invoke>\\n' }}{% endfor %}{{ '</' + w + 'function_calls>' }}{% endfor %}",
        'I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="read">\n'
        '<｜DSML｜parameter name="path" string="true">\n a\n</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="is_whole" string="false">false</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="more" string="false">{"x": [1]}</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
    "Gemma 4": Layout(
        '{% macro value(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is mapping %}'
        "{{ '{' }}{% for k, w in v | dictsort %}{{ k }}:{{ value(w) }}{{ ',' if not loop.last }}"
        "{% endfor %}{{ '}' }}"
        "{% elif v is iterable %}[{% for w in v %}{{ value(w) }}{{ ',' if not loop.last }}"
        "{% endfor %}]{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
        "{% for m in messages if m.role == 'assistant' %}{{ m.content }}"
        + _CALLS
        + "<|tool_call>call:{{ f.name }}{{ value(f.arguments) }}<tool_call|>"
        "{% endfor %}{% endfor %}",
        'I look.<|tool_call>call:read{at:{x:null},is_whole:true,lines:[1,2],path:<|"|>a "b"\n{'
        '<|"|>}<tool_call|><|tool_call>call:now{}<tool_call|>',
    ),
    "Seed-OSS": Layout(
        _TURN + _CALLS + "{{ '\\n<seed:tool_call>\\n<function=' + f.name + '>\\n' }}"
        "{% for k, v in f.arguments.items() %}{{ '<parameter=' + k + '>' }}"
        "{{ (v if v is string else v | string) + '</parameter>\\n' }}{% endfor %}"
        "{{ '</function>\\n</seed:tool_call>' }}{% endfor %}{% endfor %}",
        "I look.\n<seed:tool_call>\n<function=read>\n<parameter=path> a\n</parameter>\n"
        "<parameter=lines>[1, 2]</parameter>\n<parameter=is_whole>True</parameter>\n<parameter=at>"
        "{'x': None}</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n"
        "<function=now>\n</function>\n</seed:tool_call>",
    ),
    "GLM 4.6": Layout(
        _TURN
        + _CALLS
        + "{{ '\\n<tool_call>' + f.name + '\\n' }}{% for k, v in f.arguments.items() %}"
        "{{ '<arg_key>' + k + '</arg_key>\\n<arg_value>' + (v if v is string else v | tojson) }}"
        "{{ '</arg_value>\\n' }}{% endfor %}{{ '</tool_call>' }}{% endfor %}{% endfor %}",
        "I look.\n<tool_call>read\n<arg_key>path</arg_key>\n<arg_value>\n a </arg_value>\n"
        "<arg_key>lines</arg_key>\n<arg_value>[1, 2]</arg_value>\n<arg_key>is_whole</arg_key>\n"
        '<arg_value>false</arg_value>\n<arg_key>at</arg_key>\n<arg_value>{"x": null}</arg_value>\n'
        "</tool_call>\n<tool_call>now\n</tool_call>",
    ),
    "GLM 4.7": Layout(
        _TURN + _CALLS + "<tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}<arg_key>"
        "{{ k }}</arg_key><arg_value>{{ v if v is string else v | tojson }}</arg_value>"
        "{% endfor %}</tool_call>{% endfor %}{% endfor %}",
        "I look.<tool_call>read<arg_key>path</arg_key><arg_value>a</arg_value><arg_key>is_whole"
        "</arg_key><arg_value>true</arg_value></tool_call><tool_call>now</tool_call>",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_call_that_was_read_is_rendered_as_it_was_written(layout: Layout) -> None:
    chosen = OutputSyntax.chosen("auto", "none", layout.template).tools
    assert chosen is not None
    parser = OutputSyntax(chosen, None).parser(USE, PromptTail())
    deltas = [delta for character in layout.written for delta in parser.feed(character)]
    deltas += parser.flush()
    content, _, calls = gathered(deltas)
    ids = [
        chosen.call_id(CallSource(f"{delta.index:024}", delta.name, delta.number))
        for delta in deltas
        if isinstance(delta, CallStarted)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    message["tool_calls"] = [
        {"id": call_id, "function": {"name": called, "arguments": json.loads(arguments)}}
        for call_id, (called, arguments) in zip(ids, calls, strict=True)
    ]
    template, messages = ChatTemplate(layout.template, {}), [{"role": "user"}, message]
    assert template.render(messages) == layout.written
    # The ids that a client gives back are those that the template takes.
    assert CallIds.of(template).fitted(messages).messages == messages
