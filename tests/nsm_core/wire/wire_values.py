"""Strategies for what crosses the wire, and tensors as the other side finds them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st

from nsm_core.engine.request import GenerationRequest, Resume, SharedPrompt
from nsm_core.sampling.params import SamplingParams
from nsm_core.sampling.result import TokenLogprob
from nsm_core.wire.tensors import INPUTS, OUTPUTS, Tensors

token_ids = st.integers(0, 2**31 - 1)
id_lists = st.lists(token_ids, max_size=6).map(tuple)
counts = st.dictionaries(token_ids, st.integers(1, 2**40), max_size=4)
states = st.binary(max_size=64)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
finite = st.floats(allow_nan=False, allow_infinity=False)
logprobs = st.builds(
    TokenLogprob,
    token_id=token_ids,
    logprob=finite,
    top=st.lists(st.tuples(token_ids, finite), max_size=3).map(tuple),
)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 10**6),
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 1000),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0, 10, exclude_min=True),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(token_ids, st.floats(-100, 100), max_size=3),
    seed=st.integers(0, 2**64 - 1),
    choice_index=st.integers(0, 2**64 - 1),
    stop=st.lists(texts.filter(bool), max_size=3).map(tuple),
    stop_token_ids=id_lists,
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
)
resumes = st.builds(Resume, state=states, position=st.integers(1, 2**62), fingerprint=texts, generated_counts=counts)
requests = st.builds(
    GenerationRequest,
    request_id=st.just("r"),
    prompt_ids=st.lists(token_ids, min_size=1, max_size=6).map(tuple),
    sampling=samplings,
    resume=st.none() | resumes,
    keep_state=st.booleans(),
    prompt_logprobs=st.none() | st.integers(0, 20),
    generated_counts=counts,
    keep_states_at=id_lists,
    sampled_ids=id_lists,
    shared_prompt=st.none() | st.builds(SharedPrompt, texts.filter(bool), st.integers(2, 128)),
)


def received(tensors: Tensors) -> dict[str, np.ndarray[Any, Any]]:
    """Copies of the declared datatypes and shapes only: anything else would not have come through."""
    declared = {tensor.name: tensor for tensor in (*INPUTS, *OUTPUTS)}
    dtypes = {"BYTES": np.object_, "INT32": np.int32, "UINT8": np.uint8}
    for name, array in tensors.items():
        assert array.dtype == dtypes[declared[name].datatype]
        assert declared[name].dims in ((-1,), array.shape)
    return {name: array.copy() for name, array in tensors.items()}


def options(**fields: object) -> dict[str, np.ndarray[Any, Any]]:
    return {"options": np.array([json.dumps(fields).encode()], dtype=np.object_)}


def details_of(tensors: Mapping[str, Any]) -> dict[str, Any]:
    details: dict[str, Any] = json.loads(tensors["details"][0])
    return details
