"""Templates render as transformers' `apply_chat_template` renders them, character by character.

The templates here are of our own. Each has constructs that published ones use; those are compared
by hand with `tools/compare_templates.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.text.folders import write_folder
from tools.compare_templates import CONVERSATIONS, SPECIAL, SampleChat, ours_of, theirs_of
from transformers import PreTrainedTokenizerFast

from ferryman.errors import InvalidRequest
from ferryman.text.chat import ChatTemplate
from ferryman.text.tokenizer import Tokenizer

LOOP = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TEMPLATES = {
    "tools that may be none": (
        "{%- if tools is not none %}{{ tools | tojson }}{% else %}none{% endif %}"
        "{% if tools %}some{% endif %}{% if tools is defined %}defined{% endif %}"
    ),
    "documents that may be none": (
        "{% if documents is none %}none{% else %}{% for d in documents %}"
        "{{ loop.index0 }}{{ d.title }}{{ d['text'] }}{% endfor %}{% endif %}"
    ),
    "all options of tojson": (
        "{% for t in tools or [] %}{{ t | tojson }}{{ t | tojson(indent=4) }}"
        "{{ t | tojson(ensure_ascii=True, sort_keys=True) }}"
        "{{ t | tojson(separators=(',', ':')) }}{{ t | tojson(False, 2) }}{% endfor %}"
        "{{ messages[0].content | tojson }}"
    ),
    "the assistant's words for training": (
        "{%- for m in messages %}\n    {%- if m.role == 'assistant' %}\n"
        "        {%- set before = 'x' %}{% generation %}{% set inside = 'y' %}{{ before }}"
        "{{ m.content }}{{ eos_token }}\n        {%- endgeneration %}{{ inside }}\n    {%- else %}"
        "{{ m.content }}\n    {%- endif %}\n{% endfor %}"
    ),
    "calls and their arguments": (
        "{% for m in messages %}{% if m.tool_calls is defined and m.tool_calls %}"
        "{% for call in m.tool_calls %}{% set f = call.function %}{{ f.name }}"
        "{% if f.arguments is mapping %}{% for k, v in f.arguments | items %}{{ k }}="
        "{{ v if v is string else v | tojson }};{% endfor %}{% else %}{{ f.arguments }}"
        "{% endif %}{% endfor %}{% elif m.role == 'tool' %}{{ m.tool_call_id }}{% endif %}"
        "{% if m.content is none %}NONE{% elif 'content' in m %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    ),
    "thoughts under all names": (
        "{% for m in messages %}{% if m.reasoning_content is string %}"
        "<think>{{ m.reasoning_content.strip() }}</think>{% endif %}{{ m.thinking }}|"
        "{{ m.get('reasoning', '-') }}|{% if '</think>' in m.content %}"
        "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% endif %}{% endfor %}"
        "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    ),
    "a namespace over the loop": (
        "{% set ns = namespace(last=-1, has_tool=false, self='me') %}"
        "{% for m in messages[::-1] %}{% set i = (messages | length - 1) - loop.index0 %}"
        "{% if ns.last < 0 and m.role == 'user' %}{% set ns.last = i %}{% endif %}"
        "{% if m.role == 'tool' %}{% set ns.has_tool = true %}{% continue %}{% endif %}"
        "{% if i == 0 %}{% break %}{% endif %}{% endfor %}{{ ns.last }}{{ ns.has_tool }}"
    ),
    "a namespace with a hidden name": "{% set ns = namespace() %}{% set ns._x = 1 %}{{ ns._x }}",
    "a namespace with a hidden argument": "{% set ns = namespace(_x=1) %}x",
    "dicts made in the template": (
        "{% set d = dict(a=1, **{'b': messages | length}) %}{{ d | tojson }}"
        "{{ dict.fromkeys(['x', 'y'], 0) | tojson }}{{ dict([('k', 'v')]).k }}"
    ),
    "an attribute of the class dict": "{{ dict.mro() }}",
    "macros and whitespace": (
        "{% macro part(m, n=2) -%}\n   {{ m.role | upper | trim }}{{ '-' * n }}\n{%- endmacro %}\n"
        "{%- for m in messages -%}\n  {{ part(m) }}{{- m.content if m.content is string -}}\n"
        "{% endfor %}\n\n{{ caller is defined }}\n"
    ),
    "filters of lists": (
        "{{ messages | map(attribute='role') | join(',') }}{{ messages | selectattr('role', 'eq', "
        "'user') | list | length }}{{ (tools or []) | map(attribute='function.name') | list }}"
        "{{ messages[0].content | replace('a', 'b') if messages[0].content is string }}"
        "{{ messages | length | string ~ '!' }}{{ [3, 1, 2] | sort | first }}"
        "{% for a, b in {'x': 1}.items() %}{{ a }}{{ b }}{% endfor %}"
    ),
    "refusals": (
        "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}"
        "{{ raise_exception('unknown role ' + m.role) }}{% endif %}{{ m.content[0] }}{% endfor %}"
    ),
    "text joined to what is no text": LOOP + "{{ 'x' + messages[0].content }}",
    "strftime": "{{ strftime_now('%Y') | length }}{{ strftime_now is defined }}",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}{{ sep_token }}",
    "the prompt": LOOP + "{% if add_generation_prompt %}assistant:{% endif %}",
    "a key that is not there": "{{ messages[0]['nothing'] }}{{ messages[0]['no'].thing }}",
    "an index that is not there": "{{ messages[99].role }}",
}


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda one: one.name)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_renders_as_transformers_renders_it(
    template: str, conversation: SampleChat
) -> None:
    source = TEMPLATES[template]
    assert ours_of(source, conversation) == theirs_of(source, conversation)


def test_the_oracle_renders_most_and_refuses_some() -> None:
    found = [theirs_of(source, one) for source in TEMPLATES.values() for one in CONVERSATIONS]
    assert sum(text is None for text in found) > 40
    assert len(set(found)) > 100


@pytest.mark.parametrize("has_tools", [False, True])
def test_a_model_with_a_template_for_tools_has_it_used(tmp_path: Path, has_tools: bool) -> None:
    write_folder(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    named = [
        {"name": "default", "template": "plain{{ image_token }}"},
        {"name": "tool_use", "template": "{{ tools | length }} tools{{ mask_token }}"},
    ]
    more = {"mask_token": "<mask>", "extra_special_tokens": {"image_token": "<image>"}}
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": named, **more}))
    messages, tools = [{"role": "user", "content": "hi"}], [{"type": "function"}]
    chosen = tools if has_tools else None
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path).apply_chat_template(
        messages, tools=chosen, tokenize=False
    )
    template = Tokenizer.load(tmp_path).chat_template
    assert template is not None
    assert template.render(messages, {"tools": chosen}) == theirs


def test_a_variable_cannot_take_the_place_of_a_special_token() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages | length }}", SPECIAL)
    assert template.render([], {"bos_token": "<|system|>", "messages": [1, 2]}) == "<s>0"


def test_templates_in_files_go_before_those_of_the_config(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from a file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("for tools")
    template = Tokenizer.load(tmp_path).chat_template
    assert template is not None
    assert template.render([]) == "from a file"
    assert template.render([], {"tools": []}) == "for tools"


def test_a_template_that_calls_itself_for_ever_is_refused() -> None:
    template = ChatTemplate("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", {})
    with pytest.raises(InvalidRequest, match="refuses"):
        template.render([])
