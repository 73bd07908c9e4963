"""An example of each body of the API, as /openapi.json and the page at /docs show it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REQUESTS: Mapping[str, dict[str, Any]] = {
    "CompletionBody": {
        "prompt": "The old house stood at the end of the lane.",
        "max_tokens": 32,
        "temperature": 0.8,
        "seed": 7,
    },
    "ChatBody": {
        "messages": [
            {"role": "system", "content": "You are a sailor."},
            {"role": "user", "content": "Where does the captain live?"},
        ],
        "max_completion_tokens": 32,
        "temperature": 0.8,
    },
    "CreateResponseBody": {"input": "Where does the captain live?", "max_output_tokens": 32},
    "CountTokensBody": {"input": "Where does the captain live?"},
    "CreateConversationBody": {"items": [{"role": "user", "content": "Hello"}], "metadata": {"topic": "harbour"}},
    "UpdateConversationBody": {"metadata": {"topic": "harbour"}},
    "ItemsBody": {"items": [{"role": "user", "content": "And who looks after his house?"}]},
    "CreateSessionBody": {"id": "harbour", "metadata": {"title": "The harbour"}, "ttl_s": 86400},
    "UpdateSessionBody": {"metadata": {"title": "The old harbour"}, "ttl_s": None},
    "GenerateBody": {
        "input": "The old house stood at the end of the lane.",
        "max_tokens": 32,
        "temperature": 0.8,
        "stream": False,
    },
    "AppendBody": {"input": "Meanwhile, in the harbour,"},
    "ClearBody": {"mark": 1},
    "ForkBody": {"id": "harbour-2", "version": 1},
    "RewindBody": {"to_version": 1},
    "CreateStateBody": {"name": "sailor", "messages": [{"role": "system", "content": "You are a sailor."}]},
    "TokenizeBody": {"prompt": "The old house"},
    "DetokenizeBody": {"tokens": [40, 73]},
}
MODEL: dict[str, Any] = {
    "id": "pulse-books",
    "object": "model",
    "created": 1795945815,
    "owned_by": "nsm",
    "root": "pulse-books",
    "max_model_len": None,
    "fingerprint": "c821174ce480137be653fd5ea4138d3f4222f349476fd79b77eb6eed16975225",
    "system_fingerprint": "fp_c821174ce480_cpu/int8/native-1",
    "numerics": "cpu/int8/native-1",
    "state_bytes": 3780616,
    "state_dtype": "fp32",
    "vocab_size": 8192,
    "num_parameters": 34654784,
    "chat_template": "plain-v1",
    "prefix_cache": True,
    "retained_snapshots": 2,
    "limits": {"max_prompt_tokens": 131072, "max_tokens": 32768, "max_body_bytes": 8388608},
}

# As pulse-books answered; figures shortened.
ANSWERS: Mapping[str, dict[str, Any]] = {
    "SessionAnswer": {
        "id": "harbour",
        "object": "session",
        "version": 1,
        "position": 18,
        "created_at": 1795948550,
        "updated_at": 1795948550,
        "model": "pulse-books",
        "model_fingerprint": "c821174ce480137be653fd5ea4138d3f4222f349476fd79b77eb6eed16975225",
        "state_bytes": 3780616,
        "snapshot_bytes": 3782110,
        "metadata": {"title": "The harbour"},
        "ttl_s": 86400.0,
        "expires_at": 1796034951,
        "forked_from": None,
    },
    "CompletionAnswer": {
        "id": "cmpl-54d51917e39e478ea60242da431832b1-harbour",
        "object": "text_completion",
        "created": 1795948550,
        "model": "pulse-books",
        "system_fingerprint": "fp_c821174ce480_cpu/int8/native-1",
        "choices": [{"index": 0, "text": " It was a long, long", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 13,
            "completion_tokens": 6,
            "total_tokens": 19,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "session": {"id": "harbour", "version": 1, "position": 18},
    },
    "SessionPage": {
        "object": "list",
        "data": [
            {
                "id": "harbour",
                "object": "session",
                "version": 1,
                "position": 18,
                "created_at": 1795948550,
                "updated_at": 1795948550,
                "model": "pulse-books",
                "model_fingerprint": "c821174ce480137be653fd5ea4138d3f4222f349476fd79b77eb6eed16975225",
                "state_bytes": 3780616,
                "snapshot_bytes": 3782110,
                "metadata": {"title": "The harbour"},
                "ttl_s": 86400.0,
                "expires_at": 1796034951,
                "forked_from": None,
            }
        ],
        "has_more": False,
        "next_cursor": None,
    },
    "StatesAnswer": {
        "object": "session.states",
        "session_id": "harbour",
        "version": 1,
        "model_fingerprint": "c821174ce480137be653fd5ea4138d3f4222f349476fd79b77eb6eed16975225",
        "numerics": "cpu/int8/native-1",
        "dtype": "float32",
        "rounded_to": "float32",
        "position": 18,
        "state_bytes": 3780616,
        "detail": "layer",
        "layers": [
            {
                "layer": 0,
                "kind": "slots",
                "num_bytes": 280576,
                "use": {
                    "num_slots": 64,
                    "untouched_share": 0.0312,
                    "effective_slots": 36.238,
                    "mean": {"key_norm": 6.2722, "value_norm": 2.2964, "moved": 0.9498, "cosine": 0.482},
                },
            }
        ],
    },
    "ChatAnswer": {
        "id": "chatcmpl-d83eaa4928e5410aab06a80786a3a1e2",
        "object": "chat.completion",
        "created": 1795948550,
        "model": "pulse-books",
        "system_fingerprint": "fp_c821174ce480_cpu/int8/native-1",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "The ripe plantation of a cask, a small", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": 24,
            "completion_tokens": 12,
            "total_tokens": 36,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    },
    "ResponseObject": {
        "id": "resp_5b5b91a7813c494998f2676dcc2069b4",
        "object": "response",
        "created_at": 1795948551,
        "completed_at": None,
        "status": "incomplete",
        "background": False,
        "conversation": None,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"},
        "instructions": None,
        "max_output_tokens": 16,
        "max_tool_calls": None,
        "metadata": {},
        "model": "pulse-books",
        "output": [
            {
                "id": "msg_68017d48c2a54ed18f7683964ebd98b1",
                "type": "message",
                "role": "assistant",
                "status": "incomplete",
                "content": [
                    {
                        "type": "output_text",
                        "text": "Over His Head!\n\nMebbe ways off in the old",
                        "annotations": [],
                        "logprobs": [],
                    }
                ],
            }
        ],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": {
            "input_tokens": 17,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 16,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 33,
        },
    },
    "ItemPage": {
        "object": "list",
        "data": [
            {
                "id": "msg_90fe88c65a224cfab2944ab5a285d71c",
                "type": "message",
                "role": "user",
                "status": "completed",
                "content": [{"type": "input_text", "text": "Where does the captain live?"}],
            }
        ],
        "first_id": "msg_90fe88c65a224cfab2944ab5a285d71c",
        "last_id": "msg_90fe88c65a224cfab2944ab5a285d71c",
        "has_more": False,
    },
    "InputTokens": {"object": "response.input_tokens", "input_tokens": 17},
    "ConversationAnswer": {
        "id": "conv_659406af83cc4e6f9fca051768d15070",
        "object": "conversation",
        "created_at": 1795948551,
        "metadata": {},
    },
    "ItemAnswer": {
        "id": "msg_1a3fedff9cbc40f3aa1144f8d0e693cb",
        "type": "message",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_text", "text": "Hello"}],
    },
    "NamedStateAnswer": {
        "id": "sailor@1",
        "object": "state",
        "name": "sailor",
        "version": 1,
        "published": False,
        "created_at": 1795946200,
        "model": "pulse-books",
        "model_fingerprint": "c821174ce480137be653fd5ea4138d3f4222f349476fd79b77eb6eed16975225",
        "position": 8,
        "num_tokens": 8,
        "num_bytes": 3782210,
        "source": "messages",
        "metadata": {},
    },
    "NamedStatePage": {"object": "list", "data": []},
    "ReturnedStateAnswer": {
        "object": "state",
        "position": 8,
        "num_tokens": 8,
        "model_fingerprint": "c821174ce480137be653fd5ea4138d3f4222f349476fd79b77eb6eed16975225",
        "num_bytes": 3782210,
        "data": "TlNNU0VTUw==",
    },
    "DeletedAnswer": {"id": "harbour", "object": "session.deleted", "deleted": True},
    "ModelPage": {"object": "list", "data": [MODEL]},
    "ModelAnswer": MODEL,
    "TokensAnswer": {"count": 4, "max_model_len": None, "tokens": [0, 474, 726, 853]},
    "TextAnswer": {"prompt": "Hi"},
    "TokenizerAnswer": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        "chat_template": "{% for message in messages %}{{ {'system': '', 'user': 'User: ', "
        "'assistant': 'Assistant: '}[message['role']] + message['content'] "
        "}}{{ '\\n\\n' }}{% endfor %}{% if add_generation_prompt %}{{ "
        "'Assistant:' }}{% endif %}",
    },
    "LiveAnswer": {"status": "live"},
    "ReadyAnswer": {"status": "ready", "checks": {"engine": True, "store": True, "accepting": True}},
    "ErrorBody": {
        "error": {
            "message": "temperature must be in [0, 2], got 3.0",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": None,
        }
    },
}
EXAMPLES: Mapping[str, dict[str, Any]] = {**REQUESTS, **ANSWERS}
