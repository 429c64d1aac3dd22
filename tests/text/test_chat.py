"""Chat templates run in a sandbox, name the messages they refuse, and have bounded output."""

from __future__ import annotations

import pytest

from ferryman.errors import ConfigError, InvalidRequest
from ferryman.text.chat import ChatTemplate

HELLO = [{"role": "user", "content": "<b>hi</b>"}]


def test_a_template_sees_messages_special_tokens_and_the_prompt_flag() -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.role }}={{ m.content }}{% endfor %}"
    template = ChatTemplate(
        source + "{% if add_generation_prompt %}>{% endif %}", {"bos_token": "B"}
    )
    assert template.render(HELLO) == "Buser=<b>hi</b>>"


def test_json_in_a_template_is_not_escaped_for_html() -> None:
    assert ChatTemplate("{{ messages[0].content | tojson }}", {}).render(HELLO) == '"<b>hi</b>"'


def test_what_a_template_refuses_is_the_callers_mistake() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template.render(HELLO)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ 1 / 0 }}",
    ],
    ids=["underscores", "mutation", "huge range", "arithmetic"],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render(HELLO)


def test_output_is_bounded() -> None:
    template = ChatTemplate("{% for i in range(99999) %}xxxxxxxxxx{% endfor %}", {})
    with pytest.raises(InvalidRequest, match="too long"):
        template.render(HELLO, max_chars=1000)


def test_a_template_that_does_not_compile_is_a_configuration_mistake() -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate("{% if %}", {})
