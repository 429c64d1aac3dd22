"""A body that was read and checked: its prompts, how to sample, and how to answer."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ferryman.errors import InvalidRequest
from ferryman.schedule.request import SamplingParams
from ferryman.schedule.token_rules import TokenRules
from ferryman.text.tool_calls.thought import ContinuedMessage
from ferryman.wire.public import Prompt
from ferryman_router.bodies.field_kinds import Values
from ferryman_router.bodies.field_table import ANY_SEED, STREAM_OPTIONS, attributes
from ferryman_router.bodies.place import IgnoredField
from ferryman_router.bodies.structured_outputs import GrammarField, output_grammar
from ferryman_router.bodies.tool_fields import ToolChoice, ToolFields, forced_grammar
from ferryman_router.bodies.unread_fields import Api
from ferryman_router.routing.generate_request import RequestedSampling

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Plain values, which travel as JSON. Of `num_candidates` answers to a prompt those
    `num_samples` are shown that are likeliest. `num_logprobs` is None when none shall be shown,
    `num_prompt_logprobs` likewise for the prompt; an answer without output is the prompt alone;
    `truncate` is how many tokens of the prompt's end are kept, 0 all, -1 as many as fit; an answer
    may go on with a message that is `continued`. `compared_with` is the id of an earlier answer:
    this one says how their prompts differ. Empty: of none yet; None: it does not say."""

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
    compared_with: str | None = None
    tools: ToolChoice = field(default_factory=ToolChoice)
    continued: ContinuedMessage | None = None

    @property
    def is_ranked(self) -> bool:
        """Whether some answers are not shown."""
        return self.num_candidates > self.num_samples

    def shown(self, of_each: Sequence[T]) -> list[T]:
        """The items of the answers that are shown, from one item for each candidate."""
        num_candidates, num_samples = self.num_candidates, self.num_samples
        return [item for index, item in enumerate(of_each) if index % num_candidates < num_samples]


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A checked body. `echo` is the JSON text of an object, or empty: the fields of the answer that
    repeat the body. The fields that were `ignored` are named with the answer."""

    api: Api
    model: str
    prompts: tuple[Prompt, ...]
    sampling: RequestedSampling
    is_stream: bool
    answer: AnswerOptions
    echo: str = ""
    ignored: tuple[IgnoredField, ...] = ()


def answer_options(
    api: Api, values: Values, num_logprobs: int | None, tools: ToolFields
) -> AnswerOptions:
    """The options of an answer. Raises InvalidRequest, naming the field that cannot be."""
    streamed, num_samples = values["stream"], values.get("n", 1)
    options = values.get("stream_options")
    if options is not None and not streamed:
        raise InvalidRequest("stream_options needs stream to be true", "stream_options")
    if values.get("prompt_logprobs") is not None and streamed:
        message = "prompt_logprobs are not streamed; of a completion, echo with logprobs is"
        raise InvalidRequest(message, "prompt_logprobs")
    best_of = values.get("best_of") or num_samples
    if best_of < num_samples:
        message = f"best_of must be at least n: of {best_of} answers {num_samples} cannot be shown"
        raise InvalidRequest(message, "best_of")
    if best_of > num_samples and streamed:
        message = "which answers are best is known when all have ended: they cannot be streamed"
        raise InvalidRequest(message, "best_of")
    options = options or STREAM_OPTIONS.kind.default
    return AnswerOptions(
        num_candidates=best_of,
        num_logprobs=num_logprobs,
        includes_usage=options["include_usage"],
        includes_usage_always=options["continuous_usage_stats"],
        tools=ToolChoice.of(tools),
        **attributes(api, "answer", values),
    )


def sampling_params(
    api: Api,
    values: Values,
    max_tokens: Any,
    num_logprobs: int | None,
    *,
    tools: ToolFields,
    prescribed: Sequence[GrammarField] = (),
) -> SamplingParams:
    """The sampling parameters, which check themselves. `prescribed` are forms of the output that
    have fields of their own. Raises InvalidRequest, naming the field."""
    sampling = attributes(api, "sampling", values)
    if sampling["seed"] == ANY_SEED:  # another spelling of "any", as with vLLM and llama.cpp
        sampling["seed"] = secrets.randbits(63)
    # A call that is demanded is the form of this answer; another form is that of a later one.
    forced = forced_grammar(tools)
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=0 if num_logprobs is None else max(1, num_logprobs),
        grammar=output_grammar(values, prescribed) if forced is None else forced,
        rules=TokenRules(**attributes(api, "rules", values)),
        **sampling,
    )
