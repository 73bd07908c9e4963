"""What a model writes: continuations of a few prompts, for people to read."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

import torch

from nsm_core.execution.base import SequenceModel
from nsm_core.sampling.params import SamplingParams
from nsm_core.sampling.result import SampledToken
from nsm_core.sampling.sampler import Sampler, SamplingRow
from nsm_core.tokenizer import Tokenizer
from nsm_lab.evaluation.reading import EvaluatedModel, reading


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One continuation and how it was drawn."""

    prompt: str
    text: str
    temperature: float
    seed: int


def write_samples(
    model: EvaluatedModel, tokenizer: Tokenizer, prompts: Iterable[str], *, max_tokens: int, seed: int
) -> list[Sample]:
    """For each prompt a greedy continuation and one at temperature 0.8; at most `max_tokens` tokens each."""
    variants = (
        SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=seed),
        SamplingParams(max_tokens=max_tokens, temperature=0.8, top_p=0.95, seed=seed),
    )
    with reading(model) as device:
        return [_continue(model, tokenizer, prompt, params, device) for prompt in prompts for params in variants]


def _continue(
    model: SequenceModel, tokenizer: Tokenizer, prompt: str, params: SamplingParams, device: torch.device
) -> Sample:
    prompt_ids = [tokenizer.end_of_text_id, *tokenizer.encode(prompt)]
    hidden, state = model.forward(torch.tensor([prompt_ids], device=device), model.initial_state(1))
    last, sampler, generated = hidden[:, -1], Sampler(), list[int]()
    while len(generated) < params.max_tokens:
        position = len(prompt_ids) + len(generated)
        row = SamplingRow(params=params, position=position, generated_counts=Counter(generated))
        (result,) = sampler.sample(model.logits(last), [row])
        if not isinstance(result, SampledToken):
            raise result
        if result.token_id == tokenizer.end_of_text_id:
            break
        generated.append(result.token_id)
        last, state = model.step(torch.tensor([result.token_id], device=device), state)
    return Sample(prompt=prompt, text=tokenizer.decode(generated), temperature=params.temperature, seed=params.seed)
