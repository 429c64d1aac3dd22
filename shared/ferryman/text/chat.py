"""Chat templates of Hugging Face folders: jinja2 in a sandbox, with bounded output.

A template comes with the model and is code: it runs in an immutable sandbox, cannot reach
attributes that begin with an underscore, and is stopped when its output grows past a limit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ferryman.errors import ConfigError, InvalidRequest

Message = Mapping[str, Any]
MAX_RENDERED_CHARS = 16 * 2**20


class ChatTemplate:
    """One compiled template and the special tokens it may name (`bos_token`, `eos_token`, ...)."""

    __slots__ = ("_special", "_template")

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template does not compile: {error}") from error

    def render(self, messages: Sequence[Message], *, max_chars: int = MAX_RENDERED_CHARS) -> str:
        """The prompt up to where the assistant begins to speak.

        Raises InvalidRequest when the template refuses the messages or grows past `max_chars`.
        """
        rendered, num_chars = [], 0
        try:
            for part in self._template.generate(
                messages=list(messages), add_generation_prompt=True, **self._special
            ):
                num_chars += len(part)
                if num_chars > max_chars:
                    raise InvalidRequest("the rendered chat is too long", "messages")
                rendered.append(part)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise InvalidRequest(
                f"the chat template refuses these messages: {error}", "messages"
            ) from error
        return "".join(rendered)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: object, indent: int | None = None) -> str:
    """Templates expect plain JSON; jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now(UTC).strftime(form)
