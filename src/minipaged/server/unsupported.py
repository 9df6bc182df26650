"""Fields of other servers that a body may hold: what each is refused with, and which are taken because they ask for
nothing that an answer could show.

Every field that OpenAI's and vLLM's request classes know is declared by a body here, or stands in one of these tables;
of SGLang, llama.cpp and others, those that would change the answer.
"""

from __future__ import annotations

from typing import Any

ASKS_FOR_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_bos_token": (None, True),
    "best_of": (None, 1),
    "guided_decoding_backend": (None, "auto", "guidance", "llguidance"),
    "include_reasoning": (None, True),
    "length_penalty": (None, 1),
    "modalities": (None, ["text"]),
    "repeat_penalty": (None, 1),
    "separate_reasoning": (None, True),
    "service_tier": (None, "auto", "default"),
    "stream_interval": (None, 1),
    "stream_options": (None, {}, {"include_obfuscation": False}),
    "stream_reasoning": (None, True),
    "tfs_z": (None, 1),
    "truncation": (None, "disabled"),
    "typical_p": (None, 1),
    "verbosity": (None, "medium"),
}
"""Values of refused fields that are let through, where they are not `ASKS_FOR_NOTHING`."""

IGNORED = {
    "metadata": "for a store",
    "prediction": "changes the speed only",
    "prompt_cache_key": "which requests share a prefix is found out without it",
    "prompt_cache_options": "which requests share a prefix is found out without it",
    "prompt_cache_retention": "which requests share a prefix is found out without it",
    "return_mm_kwargs": "of vLLM's render endpoints",
    "safety_identifier": "about the user, not the answer",
    "session_id": "for routers",
    "spaces_between_special_tokens": "byte-level tokenizers have no such spaces",
    "user": "about the user, not the answer",
}
"""Fields that are taken and change nothing, and why."""

_BEAMS = "beam search does not exist here; use n"
_KV_TRANSFER = "no cache is taken from or given to other servers"
_TEXT_ONLY = "text only"

ANYWHERE = {
    "add_bos_token": "use add_special_tokens",
    "allowed_token_ids": "use logit_bias",
    "bad_words": "use logit_bias",
    "beam_width": _BEAMS,
    "best_of": "use n",
    "custom_logit_processor": "use logit_bias",
    "custom_params": "there are no custom processors",
    "dry_multiplier": "use repetition_penalty",
    "dynatemp_range": "use temperature",
    "early_stopping": _BEAMS,
    "ec_transfer_params": _KV_TRANSFER,
    "guided_decoding_backend": "llguidance is the only one",
    "guided_whitespace_pattern": "JSON is written without optional white space",
    "kv_transfer_params": _KV_TRANSFER,
    "length_penalty": _BEAMS,
    "logit_processors": "use logit_bias",
    "logits_processors": "use logit_bias",
    "logprob_token_ids": "use logprobs",
    "lora_path": "there are no adapters",
    "max_length": "use max_tokens",
    "max_new_tokens": "use max_tokens",
    "media_io_kwargs": _TEXT_ONLY,
    "mirostat": "use temperature and top_p",
    "mm_processor_kwargs": _TEXT_ONLY,
    "moderation": "nothing is moderated",
    "n_predict": "use max_tokens",
    "n_probs": "use logprobs",
    "no_stop_trim": "use include_stop_str_in_output",
    "num_beams": _BEAMS,
    "num_predict": "use max_tokens",
    "options": "write its fields into the body itself",
    "prompt_embeds": "give text or token ids",
    "repeat_penalty": "use repetition_penalty",
    "repetition_detection": "use repetition_penalty",
    "return_hidden_states": "they are not kept",
    "return_prompt_text": "use return_token_ids and /detokenize",
    "return_token_offsets": "use logprobs in /v1/completions, which have text_offset",
    "routed_experts_prompt_start": "experts are not reported",
    "samplers": "their order is fixed: temperature, top_k, top_p, min_p",
    "service_tier": "requests are served in turn; see priority",
    "session_params": "nothing is stored",
    "stop_regex": "use stop",
    "stream_interval": "tokens are sent as they come",
    "tfs_z": "use top_p",
    "top_a": "use min_p",
    "truncate_prompt_tokens": "shorten the prompt",
    "truncation_side": "shorten the prompt",
    "typical_p": "use top_p",
    "use_beam_search": _BEAMS,
    "vllm_xargs": "there are no extensions",
    "watermarking": "texts are not marked",
    "xtc_probability": "use top_p and min_p",
}

_THINKING = 'use reasoning_effort or chat_template_kwargs, e.g. {"enable_thinking": false}'

CHAT = {
    **ANYWHERE,
    "audio": _TEXT_ONLY,
    "chat_template": "the model's own template is used; see chat_template_kwargs",
    "echo": "use /v1/completions",
    "enable_thinking": _THINKING,
    "format": "use response_format",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "modalities": 'only ["text"]',
    "reasoning": "use reasoning_effort",
    "separate_reasoning": "use include_reasoning",
    "store": "nothing is stored",
    "stream_reasoning": "use include_reasoning",
    "think": _THINKING,
    "thinking": _THINKING,
    "thinking_budget": "use thinking_token_budget",
    "verbosity": "say it in a message",
    "web_search_options": "there is no search",
}

COMPLETIONS = {
    **ANYWHERE,
    "include_reasoning": "use /v1/chat/completions, which knows thoughts",
    "suffix": "leave it out",
    "thinking_token_budget": "use /v1/chat/completions, which knows thoughts",
}

RESPONSES = {
    **{name: advice for name, advice in CHAT.items() if name != "reasoning"},
    "access_programs": "there are none",
    "background": "answers are given at once; see stream",
    "background_options": "answers are given at once; see stream",
    "context_management": "shorten the input",
    "conversation": "nothing is stored: give the whole conversation as input",
    "enable_response_messages": "use return_token_ids in /v1/chat/completions",
    "image": _TEXT_ONLY,
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "max_tool_calls": "there are no built-in tools",
    "messages": "use input",
    "previous_input_messages": "give the whole conversation as input",
    "previous_response": "give the whole conversation as input",
    "previous_response_id": "nothing is stored: give the whole conversation as input",
    "prompt": "nothing is stored: use instructions and input",
    "reasoning_effort": 'use reasoning, e.g. {"effort": "low"}',
    "response_format": "use text.format",
    "store": "nothing is stored: give false",
    "stream_options": "events are not padded, and the usage always comes",
    "truncation": 'shorten the input; only "disabled"',
}

TOKENIZE = {
    "add_bos_token": "use add_special_tokens",
    "chat_template": CHAT["chat_template"],
    "media_io_kwargs": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY,
}


def asks_for_something(name: str, value: Any) -> bool:
    """Whether a refused field has a value that would change the answer, if anybody listened to it."""
    return not any(value == nothing for nothing in NEUTRAL.get(name, ASKS_FOR_NOTHING))
