"""The fields of a body that say how an answer is given: how often, of which tokens, and what is
shown of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ferryman.errors import InvalidRequest
from ferryman.schedule.request import MAX_LOGPROBS
from ferryman.schedule.token_rules import MAX_BAD_WORDS, TokenRules
from ferryman_router.bodies.api_fields import STREAM_OPTIONS
from ferryman_router.bodies.body_fields import BodyFields
from ferryman_router.bodies.tool_fields import ToolChoice

T = TypeVar("T")

MAX_CHOICES = 64
MAX_SALT_CHARS = 1024
MAX_PRIORITY = 2**31 - 1
MAX_WORD_CHARS = 256


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Plain values, which travel as JSON. Of `num_candidates` answers to a prompt those
    `num_samples` are shown that are likeliest. `num_logprobs` is None when none shall be shown,
    `num_prompt_logprobs` likewise for the prompt; an answer without output is the prompt alone;
    `truncate` is how many tokens of the prompt's end are kept, 0 all, -1 as many as fit."""

    num_samples: int = 1
    num_candidates: int = 1
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    includes_usage: bool = False
    includes_usage_always: bool = False
    returns_token_ids: bool = False
    shows_special: bool = False
    includes_stop: bool = False
    shows_thoughts: bool = True
    names_by_id: bool = False
    echoes: bool = False
    has_output: bool = True
    truncate: int = 0
    cache_salt: str = ""
    priority: int = 0
    tools: ToolChoice = field(default_factory=ToolChoice)

    @property
    def is_ranked(self) -> bool:
        """Whether some answers are not shown."""
        return self.num_candidates > self.num_samples

    def shown(self, of_each: Sequence[T]) -> list[T]:
        """Of something that each candidate has, as many for each prompt as are shown."""
        each, shown = self.num_candidates, self.num_samples
        return [one for index, one in enumerate(of_each) if index % each < shown]


def answer_options(
    fields: BodyFields, num_logprobs: int | None, tools: ToolChoice
) -> AnswerOptions:
    """InvalidRequest names the field that cannot be."""
    if fields.has("stream_options") and not fields.flag("stream"):
        raise InvalidRequest("stream_options needs stream to be true", "stream_options")
    options = fields.inner("stream_options")
    options.check_names(STREAM_OPTIONS, {})
    num_samples = fields.whole("n", 1, low=1, high=MAX_CHOICES)
    return AnswerOptions(
        num_samples=num_samples,
        num_candidates=_num_candidates(fields, num_samples),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=_num_prompt_logprobs(fields),
        includes_usage=options.flag("include_usage"),
        includes_usage_always=options.flag("continuous_usage_stats"),
        returns_token_ids=fields.flag("return_token_ids"),
        shows_special=not fields.flag("skip_special_tokens", default=True),
        includes_stop=fields.flag("include_stop_str_in_output"),
        shows_thoughts=fields.flag("include_reasoning", default=True),
        names_by_id=fields.flag("return_tokens_as_token_ids"),
        truncate=fields.whole("truncate_prompt_tokens", 0, low=-1, high=2**31 - 1),
        cache_salt=_cache_salt(fields),
        priority=fields.whole("priority", 0, low=-MAX_PRIORITY, high=MAX_PRIORITY),
        tools=tools,
    )


def _num_prompt_logprobs(fields: BodyFields) -> int | None:
    if not fields.has("prompt_logprobs"):
        return None
    if fields.flag("stream"):
        message = "prompt_logprobs are not streamed; of a completion, echo with logprobs is"
        raise InvalidRequest(message, "prompt_logprobs")
    return fields.whole("prompt_logprobs", 0, low=0, high=MAX_LOGPROBS)


def _num_candidates(fields: BodyFields, num_samples: int) -> int:
    wanted = fields.whole("best_of", num_samples, low=1, high=MAX_CHOICES)
    if wanted < num_samples:
        message = f"best_of must be at least n: of {wanted} answers {num_samples} cannot be shown"
        raise InvalidRequest(message, "best_of")
    if wanted > num_samples and fields.flag("stream"):
        message = "which answers are best is known when all have ended: they cannot be streamed"
        raise InvalidRequest(message, "best_of")
    return wanted


def _cache_salt(fields: BodyFields) -> str:
    salt = fields.text("cache_salt")
    # An empty one would be a promise that nobody keeps.
    is_empty = fields.has("cache_salt") and not salt
    if is_empty or len(salt) > MAX_SALT_CHARS or not _is_unicode(salt):
        message = f"cache_salt has 1 to {MAX_SALT_CHARS} characters of valid Unicode"
        raise InvalidRequest(message, "cache_salt")
    return salt


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def token_rules(fields: BodyFields) -> TokenRules:
    """`logit_bias`, `min_tokens` and `allowed_token_ids`; the values check themselves."""
    allowed = fields.value("allowed_token_ids")
    if allowed is not None and (not isinstance(allowed, list) or not allowed):
        message = "allowed_token_ids must be a list of at least one token id"
        raise InvalidRequest(message, "allowed_token_ids")
    biases = fields.inner("logit_bias").items_by_name().items()
    return TokenRules(
        fields.value("min_tokens", 0),
        tuple((_token_id(name), bias) for name, bias in biases),
        tuple(allowed or ()),
    )


def bad_words(fields: BodyFields) -> tuple[str, ...]:
    """Texts; InvalidRequest for too many or too long ones."""
    words = fields.items("bad_words")
    # Each may have two spellings.
    if len(words) > MAX_BAD_WORDS // 2:
        raise InvalidRequest(f"bad_words has at most {MAX_BAD_WORDS // 2} entries", "bad_words")
    for word in words:
        if not isinstance(word, str) or not 1 <= len(word) <= MAX_WORD_CHARS or not word.strip():
            message = f"a bad word is a text of 1 to {MAX_WORD_CHARS} characters"
            raise InvalidRequest(message, "bad_words")
    return tuple(words)


def _token_id(name: str) -> int:
    """JSON's names of fields are texts."""
    if not (name.isascii() and name.isdecimal() and len(name) <= 10):
        raise InvalidRequest("logit_bias has token ids for names", "logit_bias")
    return int(name)
