"""The fields of OpenAI's bodies, of vLLM's and of SGLang's that are known here.

A field is read, or is accepted without effect, or is refused with the reason; any other name is
refused with the nearest one. docs/api.md has a row for each.
"""

from __future__ import annotations

from collections.abc import Mapping

# How tokens are drawn, and what all endpoints know.
_DRAWN = frozenset(
    """
    model stream temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty
    seed stop_token_ids ignore_eos logit_bias min_tokens allowed_token_ids bad_words
    skip_special_tokens include_stop_str_in_output truncate_prompt_tokens priority cache_salt
    structured_outputs ferryman
    """.split()
)
_SAMPLING = _DRAWN | frozenset(
    """
    stop stream_options max_tokens logprobs prompt_logprobs n return_token_ids
    return_tokens_as_token_ids add_special_tokens response_format guided_json
    guided_regex guided_choice guided_grammar regex ebnf json_schema
    """.split()
)
# By field: why it changes nothing.
WITHOUT_EFFECT: Mapping[str, str] = {
    "user": "callers are told apart by their API keys",
    "safety_identifier": "callers are told apart by their API keys",
    "metadata": "nothing is stored of a request",
    "prompt_cache_key": "prefixes are found by their tokens",
    "prompt_cache_retention": "the tiers keep a prefix for as long as they have room",
    "service_tier": "there is one tier of service",
    "verbosity": "no model that is served knows it",
    "spaces_between_special_tokens": "the text of a token does not depend on the next one",
    "detokenize": "an answer always has its text",
    "session_id": "prefixes are found by their tokens",
    "stream_interval": "a frame has the tokens that have come",
    "rid": "the header x-request-id names a request",
    "request_id": "the header x-request-id names a request",
    "return_cached_tokens_details": "usage.ferryman has them always",
}
_ENGINE = "the state of a request belongs to the cluster"
_EXPERTS = "the choice of experts does not leave the workers"
# By field: what to do instead, or why it is not there.
NOT_OFFERED: Mapping[str, str] = {
    "modalities": "models here read and write text",
    "audio": "models here read and write text",
    "web_search_options": "tools are called by the client",
    "prediction": "drafts come from the model or from the prompt",
    "functions": "send tools",
    "function_call": "send tool_choice",
    "use_beam_search": "tokens are drawn one by one",
    "length_penalty": "it belongs to beam search",
    "early_stopping": "it belongs to beam search",
    "logits_processors": "code of callers is not run",
    "custom_logit_processor": "code of callers is not run",
    "chat_template": "the template of the model is used; a caller's own would be code",
    "prompt_embeds": "a prompt is text or token ids, which name its pages",
    "input_embeds": "a prompt is text or token ids, which name its pages",
    "mm_processor_kwargs": "models here read text",
    "lora_path": "name the adapter as `model`",
    "session_params": "send the whole conversation: its prefix is found in the cache",
    "return_hidden_states": "hidden states do not leave the workers",
    "kv_transfer_params": _ENGINE,
    "vllm_xargs": _ENGINE,
    "bootstrap_host": _ENGINE,
    "bootstrap_port": _ENGINE,
    "bootstrap_room": _ENGINE,
    "data_parallel_rank": _ENGINE,
    "logprob_token_ids": "top_logprobs shows the likeliest tokens",
    "truncation_side": "truncate_prompt_tokens keeps the end of a prompt",
    "watermarking": "tokens are drawn from the model's own distribution",
    "media_io_kwargs": "models here read text",
    "ec_transfer_params": _ENGINE,
    "routed_dp_rank": _ENGINE,
    "stop_regex": "send stop, or a regex that the answer matches",
    "extra_key": "send cache_salt",
    "custom_params": "code of callers is not run",
    "store": "nothing is stored of a request",
    "guided_decoding_backend": "grammars are read by llguidance",
    "echo": "the caller has the messages; of a text it gives the prompt back",
    "return_prompt_text": "return_token_ids shows the prompt; /detokenize has its text",
    "return_prompt_token_ids": "send return_token_ids",
    "return_token_offsets": "it belongs to endpoints that only render a prompt",
    "return_mm_kwargs": "models here read text",
    "return_routed_experts": _EXPERTS,
    "routed_experts_start_len": _EXPERTS,
    "routed_experts_prompt_start": _EXPERTS,
    "return_meta_info": "choices have stop_reason, and usage has the rest",
    "disagg_prefill_dp_rank": _ENGINE,
    "custom_labels": "metrics have no labels of callers",
    "ngram_corpus_id": "drafts come from the model or from the prompt",
    "images_config": "models here read text",
    "max_dynamic_patch": "models here read text",
    "min_dynamic_patch": "models here read text",
    "use_audio_in_video": "models here read text",
    "task": "the chat template decides what a model is told",
    "input_ids": "a chat has messages; /v1/completions takes token ids",
    "reasoning": "send reasoning_effort",
    "separate_reasoning": "thoughts have a field of their own, or none: send include_reasoning",
    "stream_reasoning": "thoughts are streamed as they come",
    "no_stop_trim": "send include_stop_str_in_output",
}
# By field that is not offered: the value by which a client of another server asks for what is done
# here anyway. In the others false, or an empty list or object, says so.
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
NOT_YET = "it is not there yet"
_LATER = ["thinking_token_budget", "repetition_detection"]
NOT_OFFERED = {**NOT_OFFERED, **dict.fromkeys(_LATER, NOT_YET)}

COMPLETION = _SAMPLING | {"prompt", "echo", "suffix", "best_of"} | frozenset(WITHOUT_EFFECT)
CHAT = (
    _SAMPLING
    | {"messages", "max_completion_tokens", "top_logprobs"}
    | {"tools", "tool_choice", "parallel_tool_calls", "documents", "chat_template_kwargs"}
    | {"reasoning_effort", "include_reasoning", "add_generation_prompt", "continue_final_message"}
    | frozenset(WITHOUT_EFFECT)
)
STREAM_OPTIONS = frozenset({"include_usage", "continuous_usage_stats", "include_obfuscation"})
_FOR_TEMPLATES = frozenset(
    """
    messages tools tool_choice parallel_tool_calls documents chat_template_kwargs reasoning_effort
    add_generation_prompt continue_final_message
    """.split()
)
_TOKENIZE = frozenset({"model", "add_special_tokens", "return_token_strs", "ferryman"})
TOKENIZE_TEXT = _TOKENIZE | {"prompt"}
TOKENIZE_CHAT = _TOKENIZE | _FOR_TEMPLATES
DETOKENIZE = frozenset({"model", "tokens"})
OURS = frozenset({"parse_special"})
MESSAGE = frozenset(
    """
    role content name tool_calls tool_call_id reasoning_content reasoning refusal annotations
    parsed provider_specific_fields
    """.split()
)
NOT_IN_MESSAGES: Mapping[str, str] = {
    "audio": "models here read and write text",
    "function_call": "send tool_calls",
}

# Of `/v1/responses`. Metadata and the truncation come back with the answer.
RESPONSES_WITHOUT_EFFECT: Mapping[str, str] = {
    "user": WITHOUT_EFFECT["user"],
    "safety_identifier": WITHOUT_EFFECT["safety_identifier"],
    "prompt_cache_key": WITHOUT_EFFECT["prompt_cache_key"],
    "prompt_cache_retention": WITHOUT_EFFECT["prompt_cache_retention"],
    "service_tier": WITHOUT_EFFECT["service_tier"],
    "request_id": WITHOUT_EFFECT["request_id"],
    "max_tool_calls": "it counts calls of tools that a server calls, and there are none",
}
RESPONSES = (
    _DRAWN
    | {"input", "instructions", "max_output_tokens", "top_logprobs", "include", "text", "reasoning"}
    | {"tools", "tool_choice", "parallel_tool_calls", "store", "background", "truncation"}
    | {"stop", "stream_options", "metadata", "chat_template_kwargs"}
    | frozenset(RESPONSES_WITHOUT_EFFECT)
)
_STATELESS = "nothing is stored; send the whole conversation: its prefix is found in the cache"
NOT_IN_RESPONSES: Mapping[str, str] = {
    "previous_response_id": _STATELESS,
    "previous_response": _STATELESS,
    "previous_input_messages": _STATELESS,
    "conversation": _STATELESS,
    "prompt": "prompts are not stored; send instructions and input",
    "context_management": "no item is left out; send those that fit",
    "moderation": "no model here judges texts",
    "enable_response_messages": "return_token_ids of a chat shows what the model gets",
    "mm_processor_kwargs": NOT_OFFERED["mm_processor_kwargs"],
    "kv_transfer_params": _ENGINE,
    "vllm_xargs": _ENGINE,
}
TEXT_OPTIONS = frozenset({"format", "verbosity"})
REASONING = frozenset({"effort", "summary", "generate_summary"})
RESPONSE_TOOL = frozenset({"type", "name", "description", "parameters", "strict"})
_ANY_ITEM = frozenset({"type", "id", "status"})
INPUT_ITEMS: Mapping[str, frozenset[str]] = {
    "message": _ANY_ITEM | {"role", "content", "phase"},
    "reasoning": _ANY_ITEM | {"summary", "content", "encrypted_content"},
    "function_call": _ANY_ITEM | {"call_id", "name", "arguments"},
    "function_call_output": _ANY_ITEM | {"call_id", "output"},
}
NOT_IN_INPUT: Mapping[str, str] = {"item_reference": "nothing is stored; send the item itself"}

# Of Anthropic's `/v1/messages`.
MESSAGES_WITHOUT_EFFECT: Mapping[str, str] = {
    "metadata": WITHOUT_EFFECT["metadata"],
    "service_tier": WITHOUT_EFFECT["service_tier"],
    "cache_control": WITHOUT_EFFECT["prompt_cache_key"],
}
_CONVERSATION = frozenset(
    """
    model messages system tools tool_choice thinking output_config chat_template_kwargs ferryman
    """.split()
)
COUNT_TOKENS = _CONVERSATION | {"cache_control"}
MESSAGES = (
    _CONVERSATION | _DRAWN | {"max_tokens", "stop_sequences"} | frozenset(MESSAGES_WITHOUT_EFFECT)
)
NOT_IN_MESSAGES_BODY: Mapping[str, str] = {
    "container": "tools are called by the client",
    "mcp_servers": "tools are called by the client",
    "context_management": NOT_IN_RESPONSES["context_management"],
    "inference_geo": "the cluster is where it is",
    "output_format": "send output_config with a format",
    "kv_transfer_params": _ENGINE,
}
MESSAGES_TOOL = frozenset(
    {"type", "name", "description", "input_schema", "strict", "cache_control"}
)
TOOL_CHOICE = frozenset({"type", "name", "disable_parallel_tool_use"})
THINKING = frozenset({"type", "budget_tokens", "display"})
OUTPUT_CONFIG = frozenset({"format", "effort"})
MESSAGE_OF_MESSAGES = frozenset({"role", "content"})
_ANY_BLOCK = frozenset({"type", "cache_control"})
CONTENT_BLOCKS: Mapping[str, frozenset[str]] = {
    "text": _ANY_BLOCK | {"text", "citations"},
    "thinking": _ANY_BLOCK | {"thinking", "signature"},
    "tool_use": _ANY_BLOCK | {"id", "name", "input", "caller"},
    "tool_result": _ANY_BLOCK | {"tool_use_id", "content", "is_error"},
}
