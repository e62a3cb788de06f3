"""For every parameter of the API, bodies that use it: what is sent to each route beside a prompt."""

from __future__ import annotations

from typing import Any

MAX_TOKENS = 24
PROMPT = "the cat in the hat abc"
MESSAGES = [{"role": "user", "content": PROMPT}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}
LOOK_UP = {"type": "function", "function": {"name": "look_up"}}
TOOLS = [
    {"type": "function", "function": {"name": "look_up", "description": "d", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "wait"}},
]

CHATS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seed": {"seed": 1},
    "temperature": {"temperature": 0.6, "seed": 2},
    "top_k": {"top_k": 5, "seed": 3},
    "top_p": {"top_p": 0.7, "seed": 4},
    "min_p": {"min_p": 0.1, "seed": 5},
    "frequency_penalty": {"frequency_penalty": 1.5, "seed": 6},
    "presence_penalty": {"presence_penalty": 2, "temperature": 0},
    "negative_penalty": {"presence_penalty": -2, "temperature": 0.5, "seed": 8},
    "repetition_penalty": {"repetition_penalty": 1.4, "seed": 9},
    "logit_bias": {"logit_bias": {"5": 20, "9": 19.5, "0": -100}, "seed": 10},
    "min_tokens": {"logit_bias": {"0": 100}, "min_tokens": 17, "seed": 11},
    "ignore_eos": {"logit_bias": {"0": 3}, "ignore_eos": True, "seed": 12},
    "stop_token_ids": {"stop_token_ids": [*range(20, 60)], "seed": 13},
    "stop": {"stop": ["xj", " ", "5"], "seed": 14},
    "n": {"n": 3, "seed": 15},
    "n greedy": {"n": 2, "temperature": 0},
    "priority": {"priority": -5, "seed": 16},
    "json_object": {"response_format": {"type": "json_object"}, "seed": 17, "logit_bias": {"0": -100}},
    "json_schema": {"response_format": FORM, "seed": 18, "max_tokens": 60},
    "strict": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA, "strict": True}},
        "temperature": 0,
        "stop": '"age"',
        "max_tokens": 60,
    },
    "text": {"response_format": {"type": "text"}, "seed": 19},
    "regex": {"structured_outputs": {"regex": "[a-f]{3}(-[0-9]{2}){2,5}"}, "seed": 20, "frequency_penalty": 1},
    "choice": {"structured_outputs": {"choice": ["a.b", "a|b", "the (cat)"]}, "seed": 21},
    "grammar": {"structured_outputs": {"grammar": 'root ::= "yes" | "no" [.!]+'}, "seed": 22, "min_tokens": 4},
    "lark": {"structured_outputs": {"grammar": 'start: "é" /[xyz]{3,9}/ "🤷"'}, "seed": 23},
    "json": {"structured_outputs": {"json": SCHEMA}, "seed": 24, "ignore_eos": True, "max_tokens": 60},
    "logprobs": {"logprobs": True, "top_logprobs": 3, "seed": 30},
    "logprobs alone": {"logprobs": True, "temperature": 0, "stop": ["5", "th"]},
    "required": {"tools": TOOLS, "tool_choice": "required", "seed": 31, "max_tokens": 200},
    "one call": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": 32, "max_tokens": 99},
    "named": {"tools": TOOLS, "tool_choice": LOOK_UP, "seed": 33, "max_tokens": 200},
    "cut short": {"tools": TOOLS, "tool_choice": "required", "max_tokens": 20, "seed": 34, "logprobs": True},
    "auto": {"tools": TOOLS, "seed": 35},
    "auto or form": {"tools": TOOLS, "response_format": {"type": "json_object"}, "seed": 36},
    "none": {"tools": TOOLS, "tool_choice": "none", "seed": 37},
}  # fmt: skip
COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "frequency_penalty": 0.5},
    "stop": {"stop": ["xj", " ", "5"], "seed": 14},
    "regex": {"structured_outputs": {"regex": "[a-f]{3}(-[0-9]{2}){2,5}"}, "seed": 20, "min_tokens": 14},
    "logprobs": {"logprobs": 3, "seed": 40},
    "logprobs 0": {"logprobs": 0, "seed": 41, "n": 2},
    "echo": {"echo": True, "seed": 42},
    "echo logprobs": {"echo": True, "logprobs": 2, "seed": 45, "n": 2},
    "best_of": {"best_of": 2, "n": 2, "seed": 43},
    "prompts": {"prompt": ["abc", [5, 6, 7], PROMPT], "seed": 44, "echo": True},
}
