"""System messages reach every template: where it writes them, and else as it can say them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.text.folders import write_folder

from ferryman.text.chat import ChatTemplate
from ferryman.text.system_messages import SystemMessages
from ferryman.text.tokenizer import Tokenizer

# In few words, what published templates do with these roles.
EACH = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"  # ChatML, Granite 4
HEAD_ALONE = (  # Qwen3.5
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
ALTERNATING = (  # Mistral
    "{% if messages[0].role == 'system' %}[system:{{ messages[0].content }}]"
    "{% set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}:{{ m.content }}]"
    "{% endfor %}"
)
SILENT = (  # gpt-oss
    "{% if messages[0].role in ['system', 'developer'] %}[{{ messages[0].role }}:"
    "{{ messages[0].content }}]{% endif %}{% for m in messages %}"
    "{% if m.role in ['user', 'assistant'] %}[{{ m.role }}:{{ m.content }}]{% endif %}{% endfor %}"
)
HOISTING = (  # DeepSeek V3
    "{% for m in messages if m.role == 'system' %}[system:{{ m.content }}]{% endfor %}"
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
NONE = (  # Gemma 2
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}:{{ m.content }}]"
    "{% endfor %}"
)
CHAT = [("system", "A"), ("developer", "B"), ("user", "C"), ("assistant", "D"), ("system", "E")]
CHAT += [("user", "F"), ("system", "G"), ("assistant", "H"), ("system", "I")]
STRICT = "[user:C][assistant:D][user:E\n\nF\n\nG][assistant:H][user:I]"


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (EACH, "".join(f"[{role}:{text}]" for role, text in CHAT)),
        (HEAD_ALONE, f"[system:A\n\nB]{STRICT}"),
        (ALTERNATING, f"[system:A\n\nB]{STRICT}"),
        (SILENT, f"[system:A\n\nB]{STRICT}"),
        (HOISTING, f"[system:A][system:B]{STRICT}"),
        (NONE, f"[user:A\n\nB\n\nC]{STRICT.removeprefix('[user:C]')}"),
    ],
    ids=["each", "head alone", "alternating", "silent", "hoisting", "none"],
)
def test_every_message_is_said_at_its_place(template: str, wanted: str) -> None:
    made = ChatTemplate(template, {})
    messages = [{"role": role, "content": text} for role, text in CHAT]
    if template == HOISTING:
        messages[1]["role"] = "system"
    assert made.render(SystemMessages.of(made).fitted(messages)) == wanted


@pytest.mark.parametrize("template", [EACH, HEAD_ALONE, ALTERNATING, SILENT, HOISTING, NONE])
def test_a_later_message_changes_nothing_before_it(template: str) -> None:
    made = ChatTemplate(template, {})
    rules = SystemMessages.of(made)
    messages = [{"role": role, "content": text} for role, text in CHAT if role != "developer"]
    before = made.render(rules.fitted(messages[:3]))
    assert made.render(rules.fitted(messages)).startswith(before)


def test_a_conversation_without_them_stays_as_it_is() -> None:
    rules = SystemMessages.of(ChatTemplate(NONE, {}))
    messages = [{"role": "user", "content": "A"}, {"role": "user", "content": "B"}]
    assert rules.fitted(messages) == messages


def test_of_a_template_that_writes_no_words_nothing_is_known() -> None:
    made = ChatTemplate("{% for m in messages %}{{ m.role }}.{% endfor %}", {})
    messages = [{"role": role, "content": "A"} for role in ("developer", "user", "system")]
    assert SystemMessages.of(made).fitted(messages) == messages


def test_a_tokenizer_fits_them(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(HEAD_ALONE)
    tokenizer = Tokenizer.load(tmp_path)
    messages = [{"role": "system", "content": text} for text in ("be", "short")]
    ids = tokenizer.encode_chat([*messages, {"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids.tolist()) == "[system:be\n\nshort][user:hi]"
