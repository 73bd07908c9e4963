"""Calls as tensors and back. A wrong value is refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from nsm_core.engine.request import SharedPrompt
from nsm_core.grammars.grammar import Grammar
from nsm_core.sampling.params import SamplingParams
from nsm_core.state.report import Detail
from nsm_core.wire import fields
from nsm_core.wire.calls import (
    Call,
    DescribeCall,
    GenerateCall,
    InspectCall,
    LinkCall,
    PostCall,
    ResumePoint,
    StatusCall,
)
from nsm_core.wire.tensors import (
    CONTRACT_VERSION,
    INPUT_IDS,
    INPUTS,
    MESSAGES,
    OPTIONS,
    STATE,
    TEXT_INPUT,
    Tensors,
    bytes_array,
    ids_array,
    json_array,
    read_bytes,
    read_ids,
    read_json,
    read_text,
    refuse,
    text_array,
)

GENERATE, DESCRIBE, STATUS, INSPECT, LINK, POST = "generate", "describe", "status", "inspect", "link", "post"
_OPERATION_OF: Mapping[type[Call], str] = {
    GenerateCall: GENERATE,
    DescribeCall: DESCRIBE,
    StatusCall: STATUS,
    InspectCall: INSPECT,
    LinkCall: LINK,
    PostCall: POST,
}
OPERATIONS = tuple(_OPERATION_OF.values())
# Request parameters that are the server's business
IGNORED_PARAMETERS = {"id", "instance"}
IGNORED_PREFIX = "triton_"


def _grammar(name: str, value: Any) -> Grammar:
    if not isinstance(value, dict):
        refuse(name, "an object", value)
    return Grammar.from_fields(value)


_SAMPLING: Mapping[str, fields.Parser] = {
    "max_tokens": fields.whole_number,
    "temperature": fields.number,
    "top_p": fields.number,
    "top_k": fields.top_k,
    "min_p": fields.number,
    "repetition_penalty": fields.number,
    "presence_penalty": fields.number,
    "frequency_penalty": fields.number,
    "logit_bias": fields.token_biases,
    "seed": fields.seed,
    "choice_index": fields.whole_number,
    "stop": fields.texts,
    "stop_token_ids": fields.whole_numbers,
    "ignore_eos": fields.flag,
    "min_tokens": fields.whole_number,
    "grammar": fields.optional(_grammar),
    "logprobs": fields.optional(fields.whole_number),
}
_RESUME: Mapping[str, fields.Parser] = {
    "position": fields.whole_number,
    "fingerprint": fields.text,
    "generated_counts": fields.token_counts,
    "pending": fields.optional(fields.whole_number),
    "state_id": fields.optional(fields.text),
}


def _resume_point(name: str, value: Any) -> ResumePoint:
    if not isinstance(value, dict):
        refuse(name, "an object", value)
    parsed = fields.parse(value, _RESUME, within=f"{name}.")
    for wanted in ("position", "fingerprint", "generated_counts"):
        if wanted not in parsed:
            refuse(f"{name}.{wanted}", "given", None)
    return ResumePoint(**parsed)


_SHARED: Mapping[str, fields.Parser] = {"name": fields.text, "num_requests": fields.whole_number}


def _shared_prompt(name: str, value: Any) -> SharedPrompt:
    if not isinstance(value, dict):
        refuse(name, "an object", value)
    parsed = fields.parse(value, _SHARED, within=f"{name}.")
    for wanted in _SHARED:
        if wanted not in parsed:
            refuse(f"{name}.{wanted}", "given", None)
    return SharedPrompt(**parsed)


_GENERATE: Mapping[str, fields.Parser] = {
    "stream": fields.flag,
    "resume": fields.optional(_resume_point),
    "return_state": fields.flag,
    "keep_state": fields.flag,
    "prompt_logprobs": fields.optional(fields.whole_number),
    "timeout_s": fields.optional(fields.positive_number),
    "generated_counts": fields.token_counts,
    "keep_states_at": fields.whole_numbers,
    "sampled_ids": fields.whole_numbers,
    "shared_prompt": fields.optional(_shared_prompt),
}


def _detail(name: str, value: Any) -> Detail:
    if value not in list(Detail):
        refuse(name, f"one of {', '.join(Detail)}", value)
    return Detail(value)


_POST: Mapping[str, fields.Parser] = {"link": fields.text, "number": fields.whole_number}
_INSPECT: Mapping[str, fields.Parser] = {"detail": _detail, "layer": fields.optional(fields.whole_number)}


def encode_call(call: Call, *, with_state: bool = True) -> dict[str, Any]:
    """A call as the tensors to send. `with_state` False leaves out the bytes that `resume.state_id` names."""
    if isinstance(call, GenerateCall):
        return _encode_generate(call, with_state=with_state)
    options: dict[str, Any] = {"contract": CONTRACT_VERSION, "op": _OPERATION_OF[type(call)]}
    tensors: dict[str, Any] = {}
    if isinstance(call, LinkCall | PostCall):
        options["link"] = call.name
    if isinstance(call, PostCall):
        options["number"] = call.number
        tensors[MESSAGES] = bytes_array(call.messages)
    if isinstance(call, InspectCall):
        options |= {"detail": str(call.detail), "layer": call.layer}
        if call.state is not None:
            tensors[STATE] = bytes_array(call.state)
    return {OPTIONS: json_array(options), **tensors}


def decode_call(tensors: Tensors, parameters: Mapping[str, Any], *, draw_seed: Callable[[], int]) -> Call:
    """The call in a request's tensors and parameters; every scalar option may come as a parameter instead.

    `draw_seed` is asked for calls that name no seed. Raises InvalidRequest naming the field.
    """
    known = {tensor.name for tensor in INPUTS}
    for name in tensors:
        if name not in known:
            refuse(name, f"one of the inputs {', '.join(sorted(known))}", "another")
    options = _merge(read_json(tensors, OPTIONS) or {}, parameters)
    contract, operation = options.pop("contract", CONTRACT_VERSION), options.pop("op", GENERATE)
    if contract != CONTRACT_VERSION:
        refuse("contract", f"{CONTRACT_VERSION}, which this worker speaks", contract)
    if operation == GENERATE:
        return _decode_generate(tensors, options, draw_seed)
    if operation not in OPERATIONS:
        refuse("op", f"one of {', '.join(OPERATIONS)}", operation)
    if operation == INSPECT:
        return InspectCall(state=read_bytes(tensors, STATE), **fields.parse(options, _INSPECT))
    if operation == LINK:
        return LinkCall(_parse_all(options, {"link": fields.text})["link"])
    if operation == POST:
        return _decode_post(tensors, options)
    fields.parse(options, {})
    return DescribeCall() if operation == DESCRIBE else StatusCall()


def _decode_post(tensors: Tensors, options: Mapping[str, Any]) -> PostCall:
    parsed, messages = _parse_all(options, _POST), read_bytes(tensors, MESSAGES)
    if messages is None:
        refuse(MESSAGES, "given", None)
    return PostCall(parsed["link"], parsed["number"], messages)


def _parse_all(options: Mapping[str, Any], parsers: Mapping[str, fields.Parser]) -> dict[str, Any]:
    """`fields.parse`, of options that must all be there."""
    parsed = fields.parse(options, parsers)
    for wanted in parsers:
        if wanted not in parsed:
            refuse(wanted, "given", None)
    return parsed


def _merge(options: dict[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in parameters.items():
        if name in IGNORED_PARAMETERS or name.startswith(IGNORED_PREFIX):
            continue
        if name in options:
            refuse(name, "given once, in options or as a parameter", value)
        options[name] = value
    return options


def _encode_generate(call: GenerateCall, *, with_state: bool) -> dict[str, Any]:
    sampling = {
        field.name: getattr(call.sampling, field.name)
        for field in dataclasses.fields(SamplingParams)
        if field.name not in ("logit_bias", "grammar")
        and (field.name == "seed" or getattr(call.sampling, field.name) != field.default)
    }
    if call.sampling.logit_bias:
        sampling["logit_bias"] = {str(token_id): bias for token_id, bias in call.sampling.logit_bias.items()}
    if call.sampling.grammar is not None:
        sampling["grammar"] = call.sampling.grammar.to_fields()
    options: dict[str, Any] = {
        "stream": call.stream,
        "resume": None if call.resume is None else encode_resume(call.resume),
        "return_state": call.return_state,
        "keep_state": call.keep_state,
        "prompt_logprobs": call.prompt_logprobs,
        "timeout_s": call.timeout_s,
        "generated_counts": sorted(call.generated_counts.items()),
        "keep_states_at": call.keep_states_at,
        "sampled_ids": call.sampled_ids,
        "shared_prompt": None if call.shared_prompt is None else dataclasses.asdict(call.shared_prompt),
    }
    given = {name: value for name, value in options.items() if not _is_default(value)}
    tensors: dict[str, Any] = {OPTIONS: json_array({"contract": CONTRACT_VERSION, "op": GENERATE, **sampling, **given})}
    if call.text is not None:
        tensors[TEXT_INPUT] = text_array(call.text)
    if call.prompt_ids is not None:
        tensors[INPUT_IDS] = ids_array(call.prompt_ids)
    if call.state is not None and with_state:
        tensors[STATE] = bytes_array(call.state)
    return tensors


def _is_default(value: object) -> bool:
    """Whether an option of GenerateCall is left out. 0 alternatives are asked for, None is not."""
    return value is None or value is False or value in ((), [])


def encode_resume(point: ResumePoint) -> dict[str, Any]:
    """As JSON values; `generated_counts` in rising order of the ids."""
    return {
        "position": point.position,
        "fingerprint": point.fingerprint,
        "generated_counts": sorted(point.generated_counts.items()),
        "pending": point.pending,
        "state_id": point.state_id,
    }


def decode_resume(value: Any) -> ResumePoint:
    """The inverse of `encode_resume`; raises InvalidRequest naming the field."""
    return _resume_point("resume", value)


def _decode_generate(tensors: Tensors, options: dict[str, Any], draw_seed: Callable[[], int]) -> GenerateCall:
    parsed = fields.parse(options, {**_SAMPLING, **_GENERATE})
    sampling = {name: parsed.pop(name) for name in _SAMPLING if name in parsed}
    if "seed" not in sampling:
        sampling["seed"] = draw_seed()
    call = GenerateCall(
        text=read_text(tensors, TEXT_INPUT),
        prompt_ids=read_ids(tensors, INPUT_IDS),
        sampling=SamplingParams(**sampling),
        state=read_bytes(tensors, STATE),
        **parsed,
    )
    check_generate(call)
    return call


def check_generate(call: GenerateCall) -> None:
    """Raises InvalidRequest for options that do not go together."""
    if (call.text is None) == (call.prompt_ids is None):
        refuse(TEXT_INPUT, f"given, or {INPUT_IDS} instead", "neither" if call.text is None else "both")
    if call.state is not None and call.resume is None:
        refuse("resume", "given with a state: the object of the turn that returned it", None)
    if call.resume is not None and call.state is None and call.resume.state_id is None:
        refuse(STATE, "given, or resume.state_id", None)
    if call.keep_states_at and not call.stream:
        refuse("stream", "true with keep_states_at: each state is an event of its own", call.stream)
