"""Fields that clients send and that are not served: those that would change the answer, and those that would not.

docs/api.md has them in a table.
"""

from __future__ import annotations

from collections.abc import Mapping

from pilotfish_engine.server.body import Unserved, Values

_NOTHING = (None,)
_OFF = (None, False)

# What other engines, and OpenAI's own, do otherwise when they are told so.
_CHANGES_ANSWERS: Values = {
    "add_generation_prompt": (None, True),
    "allowed_token_ids": _NOTHING,
    "audio": _NOTHING,
    "bad_words": (None, []),
    "chat_template": _NOTHING,
    "continue_final_message": _OFF,
    "custom_logit_processor": _NOTHING,
    "documents": (None, []),
    "dry_multiplier": (None, 0),
    "ebnf": _NOTHING,
    "function_call": (None, "none"),
    "functions": (None, []),
    "grammar": (None, ""),
    "guided_choice": _NOTHING,
    "guided_grammar": _NOTHING,
    "guided_json": _NOTHING,
    "guided_regex": _NOTHING,
    "include_stop_str_in_output": _OFF,
    "json_schema": _NOTHING,
    "length_penalty": (None, 1),
    "logits_processors": (None, []),
    "lora_path": _NOTHING,
    "max_new_tokens": _NOTHING,
    "max_output_tokens": _NOTHING,
    "min_new_tokens": _NOTHING,
    "mirostat": (None, 0),
    "modalities": (None, ["text"]),
    "moderation": _NOTHING,
    "n_predict": (None, -1),
    "no_stop_trim": _OFF,
    "prompt_embeds": _NOTHING,
    "prompt_logprobs": _NOTHING,
    "regex": _NOTHING,
    "repeat_penalty": (None, 1),
    "return_hidden_states": _OFF,
    "return_token_ids": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "skip_special_tokens": (None, True),
    "stop_regex": (None, []),
    "stop_sequences": (None, []),
    "structural_tag": _NOTHING,
    "suffix": (None, ""),
    "system": _NOTHING,
    "tfs_z": (None, 1),
    "top_a": (None, 0),
    "top_n_sigma": (None, -1, 0),
    "truncate_prompt_tokens": _NOTHING,
    "typical_p": (None, 1),
    "use_beam_search": _OFF,
    "web_search_options": _NOTHING,
    "xtc_probability": (None, 0),
}
# Wishes about cost, speed, storage and style that no answer of this engine follows.
_CHANGES_NO_ANSWER: Values = {
    "prediction": _NOTHING,
    "prompt_cache_options": _NOTHING,
    "service_tier": (None, "auto", "default"),
    "store": _OFF,
    "verbosity": (None, "medium"),
}
_INSTEAD: Mapping[str, str] = {
    "ebnf": "structured_outputs with a grammar would work",
    "function_call": "tool_choice, or tool_calls in a message, would work",
    "functions": "tools would work",
    "grammar": "structured_outputs with a grammar would work",
    "guided_choice": "structured_outputs with a choice would work",
    "guided_grammar": "structured_outputs with a grammar would work",
    "guided_json": "response_format, or structured_outputs with json, would work",
    "guided_regex": "structured_outputs with a regex would work",
    "json_schema": "response_format would work",
    "max_completion_tokens": "max_tokens would work",
    "max_new_tokens": "max_tokens would work",
    "max_output_tokens": "max_tokens would work",
    "messages": "/v1/chat/completions has it; prompt would work",
    "min_new_tokens": "min_tokens would work",
    "n_predict": "max_tokens would work",
    "prompt": "/v1/completions has it; messages would work",
    "regex": "structured_outputs with a regex would work",
    "repeat_penalty": "repetition_penalty would work",
    "stop_sequences": "stop would work",
    "system": "a message of the role system would work",
    "top_logprobs": "logprobs with their number would work",
}

IN_CHATS = Unserved(
    {**_CHANGES_ANSWERS, "best_of": (None, 1), "echo": _OFF, "prompt": _NOTHING}, _CHANGES_NO_ANSWER, _INSTEAD
)
IN_COMPLETIONS = Unserved(
    {
        **_CHANGES_ANSWERS,
        "chat_template_kwargs": (None, {}),
        "max_completion_tokens": _NOTHING,
        "messages": _NOTHING,
        "tool_choice": (None, "none", "auto"),
        "tools": (None, []),
        "top_logprobs": (None, 0),
    },
    _CHANGES_NO_ANSWER,
    _INSTEAD,
)
# Clients send an answer's message back as part of the next question, with what their SDK made of it.
IN_MESSAGES = Unserved({"audio": _NOTHING, "function_call": _NOTHING}, {"annotations": (None, [])}, _INSTEAD)

# A counter tells these apart; others are the client's words, which no label may be made of.
OFTEN_IGNORED = frozenset(_CHANGES_NO_ANSWER) | {
    "annotations", "cache_control", "index", "parsed", "parsed_arguments", "reasoning", "thinking_blocks",
}  # fmt: skip
