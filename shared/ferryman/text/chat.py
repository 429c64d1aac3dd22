"""Chat templates of Hugging Face folders: jinja2 in a sandbox, with bounded output.

A template comes with the model and is code. It runs in an immutable sandbox, cannot reach
attributes that begin with an underscore, and is stopped when its output grows past a limit.

A rendering is the one of transformers' `apply_chat_template`, character by character; the
differences are in `ChatTemplate.render` and `strftime_now`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ferryman.errors import ConfigError, InvalidRequest

Message = Mapping[str, Any]
MAX_RENDERED_CHARS = 16 * 2**20
NO_VARIABLES: Mapping[str, Any] = {}

_DEFAULTS: Mapping[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": True}
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """One compiled template and the special tokens it may name (`bos_token`, `eos_token`, ...).

    `tool_source` is the template for requests with tools, if a model has one of its own.
    """

    __slots__ = ("_special", "_template", "_tool_template", "source", "tool_source")

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_source: str = ""
    ) -> None:
        self.source, self.tool_source = source, tool_source or source
        self._special = dict(special_tokens)
        self._template = _compiled(source)
        self._tool_template = _compiled(tool_source) if tool_source else self._template

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] = NO_VARIABLES,
        *,
        max_chars: int = MAX_RENDERED_CHARS,
    ) -> str:
        """The prompt, up to the place where the assistant's turn begins. `variables` are what the
        template may read besides, such as `tools` and `documents`, which are None when absent.

        A variable cannot take the place of a special token. A message's fields that are None are
        left out, and its reasoning has all names that templates read it by. Raises InvalidRequest
        when the template refuses the messages or grows past `max_chars`.
        """
        values = {**_DEFAULTS, **variables, **self._special, "messages": _readable(messages)}
        template = self._tool_template if values["tools"] is not None else self._template
        rendered, num_chars = [], 0
        try:
            for part in template.generate(values):
                num_chars += len(part)
                if num_chars > max_chars:
                    raise InvalidRequest("the rendered chat is too long", "messages")
                rendered.append(part)
        except _REFUSALS as error:
            raise InvalidRequest(
                f"the chat template refuses these messages: {error}", "messages"
            ) from error
        return "".join(rendered)


# All errors that a template can raise in the sandbox by what it does with its arguments.
_REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)


def _readable(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """The messages as templates expect them."""
    return [
        _with_reasoning({name: value for name, value in message.items() if value is not None})
        for message in messages
    ]


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Qwen's templates read `reasoning_content`, gpt-oss's read `thinking`."""
    reasonings = [message[name] for name in _REASONING_NAMES if name in message]
    if not reasonings:
        return message
    return {"thinking": reasonings[0], **message, "reasoning_content": reasonings[0]}


class GenerationBlock(Extension):
    """`{% generation %}` … `{% endgeneration %}` around the assistant's words, for training.

    It renders to its body, in a scope of its own as in a call block.
    """

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads it from the class)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


class TemplateDict:
    """`dict` in a template: it makes dicts, and has none of the class's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class TemplateNamespace(Namespace):
    """`namespace` in a template; it has no attributes that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # a template may call an attribute "self"
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"{name!r} is no name for a namespace's attribute")


def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": TemplateDict(),
        "namespace": TemplateNamespace,
    }
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template does not compile: {error}") from error


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it, without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    """In UTC, so that routers in different places agree; transformers takes local time."""
    return datetime.now(UTC).strftime(form)
