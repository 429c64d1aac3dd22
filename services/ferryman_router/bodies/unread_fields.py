"""The bodies that are read, and the fields of them that are known and not read.

Such a field is accepted without effect, or refused, with the reason. A line here is a row of
docs/api.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Api(StrEnum):
    """The bodies that are read, each of an endpoint."""

    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSES = "response"
    MESSAGES = "message"
    COUNT = "count_tokens"
    TOKENIZE_CHAT = "tokenize a chat"
    TOKENIZE_TEXT = "tokenize a text"
    DETOKENIZE = "detokenize"


Apis = frozenset[Api]

CHAT, COMPLETION, RESPONSES, MESSAGES, COUNT, TOKENIZE_CHAT, TOKENIZE_TEXT, DETOKENIZE = (
    frozenset({api}) for api in Api
)
OPENAI = CHAT | COMPLETION
ANTHROPIC = MESSAGES | COUNT
BOTH = OPENAI | RESPONSES
ALL = BOTH | MESSAGES


@dataclass(frozen=True, slots=True)
class Unread:
    """Fields of the bodies `on` some endpoints, and why they are not read."""

    names: str
    why: str
    on: Apis = OPENAI


_BY_TOKENS = "prefixes are found by their tokens"
_KEPT = "the tiers keep a prefix for as long as they have room"
_BY_HEADER = "the header x-request-id names a request"
_CALLS = "it counts calls of tools that a server calls, and there are none"
WITHOUT_EFFECT = (
    Unread("user safety_identifier", "callers are told apart by their API keys", BOTH),
    Unread("metadata", "nothing is stored of a request", OPENAI | MESSAGES),
    Unread("prompt_cache_key", _BY_TOKENS, BOTH),
    Unread("prompt_cache_retention", _KEPT, BOTH),
    Unread("service_tier", "there is one tier of service", ALL),
    Unread("verbosity", "no model that is served knows it"),
    Unread("spaces_between_special_tokens", "the text of a token does not depend on the next one"),
    Unread("detokenize", "an answer always has its text"),
    Unread("session_id", _BY_TOKENS),
    Unread("stream_interval", "a frame has the tokens that have come"),
    Unread("rid", _BY_HEADER),
    Unread("request_id", _BY_HEADER, BOTH),
    Unread("return_cached_tokens_details", "usage.ferryman has them always"),
    Unread("max_tool_calls", _CALLS, RESPONSES),
    Unread("client_metadata", "nothing is stored of a request", RESPONSES),
)

NOT_YET = "it is not there yet"
_ENGINE = "the state of a request belongs to the cluster"
_TEXT = "models here read and write text"
_READ = "models here read text"
_BY_CLIENT = "tools are called by the client"
_STATELESS = "nothing is stored; send the whole conversation: its prefix is found in the cache"
_RANKS = "bootstrap_host bootstrap_port bootstrap_room data_parallel_rank"
_EXPERTS = "return_routed_experts routed_experts_start_len routed_experts_prompt_start"
_IMAGES = "return_mm_kwargs images_config max_dynamic_patch min_dynamic_patch use_audio_in_video"
_PREVIOUS = "previous_response_id previous_response previous_input_messages conversation"
_LIKELIEST = "top_logprobs shows the likeliest tokens"
_THOUGHTS = "thoughts have a field of their own, or none: send include_reasoning"
_ITS_TEXT = "return_token_ids shows the prompt; /detokenize has its text"
NOT_OFFERED = (
    Unread("modalities audio", _TEXT),
    Unread("mm_processor_kwargs", _READ, BOTH),
    Unread("web_search_options", _BY_CLIENT),
    Unread("prediction", "drafts come from the model or from the prompt"),
    Unread("functions", "send tools"),
    Unread("function_call", "send tool_choice"),
    Unread("use_beam_search", "tokens are drawn one by one"),
    Unread("length_penalty early_stopping", "it belongs to beam search"),
    Unread("logits_processors custom_logit_processor", "code of callers is not run"),
    Unread("chat_template", "the template of the model is used; a caller's own would be code"),
    Unread("prompt_embeds input_embeds", "a prompt is text or token ids, which name its pages"),
    Unread("lora_path", "name the adapter as `model`"),
    Unread("session_params", "send the whole conversation: its prefix is found in the cache"),
    Unread("return_hidden_states", "hidden states do not leave the workers"),
    Unread("kv_transfer_params", _ENGINE, ALL | COUNT),
    Unread("vllm_xargs", _ENGINE, BOTH),
    Unread(_RANKS, _ENGINE),
    Unread("logprob_token_ids", _LIKELIEST),
    Unread("truncation_side", "truncate_prompt_tokens keeps the end of a prompt"),
    Unread("watermarking", "tokens are drawn from the model's own distribution"),
    Unread("media_io_kwargs", _READ),
    Unread("ec_transfer_params routed_dp_rank", _ENGINE),
    Unread("stop_regex", "send stop, or a regex that the answer matches"),
    Unread("extra_key", "send cache_salt"),
    Unread("custom_params", "code of callers is not run"),
    Unread("store", "nothing is stored of a request"),
    Unread("guided_decoding_backend", "grammars are read by llguidance"),
    Unread("echo", "the caller has the messages; of a text it gives the prompt back", CHAT),
    Unread("return_prompt_text", _ITS_TEXT),
    Unread("return_prompt_token_ids", "send return_token_ids"),
    Unread("return_token_offsets", "it belongs to endpoints that only render a prompt"),
    Unread(_IMAGES, _READ),
    Unread(_EXPERTS, "the choice of experts does not leave the workers"),
    Unread("return_meta_info", "choices have stop_reason, and usage has the rest"),
    Unread("disagg_prefill_dp_rank", _ENGINE),
    Unread("custom_labels", "metrics have no labels of callers"),
    Unread("ngram_corpus_id", "drafts come from the model or from the prompt"),
    Unread("task", "the chat template decides what a model is told"),
    Unread("input_ids", "a chat has messages; /v1/completions takes token ids"),
    Unread("reasoning", "send reasoning_effort"),
    Unread("separate_reasoning", _THOUGHTS),
    Unread("stream_reasoning", "thoughts are streamed as they come"),
    Unread("no_stop_trim", "send include_stop_str_in_output"),
    Unread("thinking_token_budget repetition_detection", NOT_YET),
    Unread(_PREVIOUS, _STATELESS, RESPONSES),
    Unread("prompt", "prompts are not stored; send instructions and input", RESPONSES),
    Unread("container mcp_servers", _BY_CLIENT, ANTHROPIC),
    Unread("context_management", "no item is left out; send those that fit", RESPONSES),
    Unread("moderation", "no model here judges texts", RESPONSES),
    Unread(
        "enable_response_messages",
        "return_token_ids of a chat shows what the model gets",
        RESPONSES,
    ),
    Unread("inference_geo", "the cluster is where it is", ANTHROPIC),
    Unread("output_format", "send output_config with a format", ANTHROPIC),
)
# By field that is not offered: the value by which a client of another server asks for what is done
# here anyway. The others are left out by false, or by an empty list or object.
AS_LEFT_OUT: Mapping[str, object] = {
    "modalities": ["text"],
    "length_penalty": 1,
    "truncation_side": "left",
    "thinking_token_budget": -1,
    "return_mm_kwargs": True,
    "routed_experts_start_len": 0,
    "routed_experts_prompt_start": 0,
    "separate_reasoning": True,
    "stream_reasoning": True,
}


def is_left_out(field: str, value: object) -> bool:
    """Whether a field that is not offered is not wanted: clients send the defaults of the servers
    they know."""
    if value is not None and field in AS_LEFT_OUT:
        return value == AS_LEFT_OUT[field]
    return value is False or value in (None, [], {})


def reasons(rows: Iterable[Unread], api: Api) -> dict[str, str]:
    """The reason of each field of a body that is not read."""
    return {name: row.why for row in rows if api in row.on for name in row.names.split()}
