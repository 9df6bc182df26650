"""The fields of the request bodies that OpenAI's client and vLLM 0.33's request classes know."""

from __future__ import annotations

from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params


def openai_fields(kind: type) -> set[str]:
    """Of a TypedDict of the client's, inherited ones included."""
    return set().union(*(getattr(base, "__annotations__", {}) for base in (kind, *kind.__orig_bases__)))


_VLLM = {
    *("use_beam_search", "top_k", "min_p", "repetition_penalty", "watermarking", "length_penalty", "stop_token_ids"),
    *("include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens"),
    *("truncate_prompt_tokens", "truncation_side", "allowed_token_ids", "prompt_logprobs", "logprob_token_ids"),
    *("bad_words", "structured_outputs", "priority", "request_id", "session_id", "return_tokens_as_token_ids"),
    *("return_token_ids", "routed_experts_prompt_start", "return_token_offsets", "return_mm_kwargs", "cache_salt"),
    *("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "repetition_detection", "thinking_token_budget"),
    *("stream_interval", "add_special_tokens", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("guided_decoding_backend", "guided_whitespace_pattern", "logits_processors", "best_of", "early_stopping"),
}
COMPLETIONS = {
    *openai_fields(completion_create_params.CompletionCreateParamsStreaming),
    *_VLLM,
    *("prompt_embeds", "response_format"),
}
CHAT = {
    *openai_fields(chat_create_params.CompletionCreateParamsStreaming),
    *_VLLM,
    *("echo", "add_generation_prompt", "continue_final_message", "documents", "chat_template", "chat_template_kwargs"),
    *("media_io_kwargs", "mm_processor_kwargs", "return_prompt_text", "include_reasoning"),
}
RESPONSES = {
    *openai_fields(response_create_params.ResponseCreateParamsStreaming),
    *("logit_bias", "top_k", "skip_special_tokens", "include_stop_str_in_output", "request_id", "mm_processor_kwargs"),
    *("priority", "cache_salt", "enable_response_messages", "previous_input_messages", "previous_response"),
    *("structured_outputs", "repetition_penalty", "seed", "stop", "ignore_eos", "vllm_xargs"),
}
