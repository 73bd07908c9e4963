from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from nsm_core.errors import ConfigError
from nsm_core.model.nsm import NsmModel
from nsm_core.state.spec import State, StateSpec, TensorSpec
from nsm_core.tokenizer import Tokenizer
from nsm_lab.evaluation import passkey
from nsm_lab.evaluation.passkey import measure_passkey

FILLER = np.arange(1, 400, dtype=np.int64)


class KeyReader(torch.nn.Module):
    """Writes the first five-digit number of the text it has read, and nothing else: a model that solves the task.

    Its state is the text, up to 512 tokens; hidden vectors are logits.
    """

    state_spec = StateSpec((TensorSpec("position", (), torch.int64), TensorSpec("text", (512,), torch.float32)))

    def __init__(self, tokenizer: Tokenizer, is_blind: bool = False) -> None:
        super().__init__()
        self.tokenizer, self.is_blind = tokenizer, is_blind

    def initial_state(self, batch_size: int) -> State:
        return self.state_spec.zeros(batch_size)

    def step(self, ids: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        hidden, state = self.forward(ids[:, None], state)
        return hidden[:, 0], state

    def forward(
        self, ids: torch.Tensor, state: State, lengths: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, State]:
        position, text = state["position"].clone(), state["text"].clone()
        hidden = torch.zeros(*ids.shape, self.tokenizer.vocab_size)
        for row in range(len(ids)):
            for index in range(ids.shape[1] if lengths is None else int(lengths[row])):
                text[row, position[row]] = ids[row, index]
                position[row] += 1
                hidden[row, index, self._next(text[row, : position[row]].long().tolist())] = 20.0
        return hidden, {"position": position, "text": text}

    def _next(self, read: list[int]) -> int:
        question = self.tokenizer.encode(passkey.QUESTION)
        asked = [end for end in range(len(read) + 1) if read[:end][-len(question) :] == question]
        key = re.search(r"The pass key is ([0-9]{5})\.", self.tokenizer.decode(read))
        if not asked or key is None or self.is_blind:
            return 1
        wanted = self.tokenizer.encode(passkey.ANSWER.format(key=key[1]))
        return wanted[min(len(read) - asked[0], len(wanted) - 1)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def test_a_model_that_reads_the_key_finds_and_writes_it(tiny_tokenizer: Tokenizer) -> None:
    result = measure_passkey(
        KeyReader(tiny_tokenizer), tiny_tokenizer, FILLER, lengths=(100, 130), depths=(0.0, 0.4, 1.0), num_examples=2
    )
    assert [(cell.length, cell.depth) for cell in result.cells] == [
        (length, depth) for length in (100, 130) for depth in (0.0, 0.4, 1.0)
    ]
    for cell in result.cells:
        assert (cell.num_examples, cell.num_written, cell.num_chosen, cell.mean_rank) == (2, 2, 2, 1.0)
        assert cell.mean_log_prob > -0.1
        assert cell.mean_margin > 10.0


def test_a_model_that_never_saw_the_key_does_not(tiny_tokenizer: Tokenizer) -> None:
    blind = KeyReader(tiny_tokenizer, is_blind=True)
    (cell,) = measure_passkey(blind, tiny_tokenizer, FILLER, lengths=(120,), depths=(0.5,), num_examples=3).cells
    assert (cell.num_written, cell.mean_margin <= 0.0) == (0, True)


def test_a_prompt_has_its_length_and_the_key_at_its_depth(tiny_tokenizer: Tokenizer) -> None:
    for depth, length in ((0.0, 90), (0.5, 300), (1.0, 1000)):
        example = passkey._make_example(tiny_tokenizer, FILLER, length, depth, np.random.default_rng(1))
        assert len(example.prompt) == length
        assert example.prompt[0] == tiny_tokenizer.end_of_text_id
        assert len(set(example.choices)) == passkey.NUM_CHOICES
        needle = tiny_tokenizer.encode(passkey.NEEDLE.format(key=example.choices[0]))
        question = tiny_tokenizer.encode(passkey.QUESTION)
        windows = np.lib.stride_tricks.sliding_window_view(example.prompt, len(needle))
        (at,) = np.flatnonzero((windows == needle).all(axis=1))
        assert at - 1 == round(depth * (length - 1 - len(needle) - len(question)))
        assert example.prompt[-len(question) :].tolist() == question


def test_log_probabilities_are_those_of_one_forward_pass_and_rows_do_not_matter(
    any_model: NsmModel, tiny_tokenizer: Tokenizer
) -> None:
    examples = [
        passkey._make_example(tiny_tokenizer, FILLER, 90, depth, np.random.default_rng(3)) for depth in (0.0, 0.9)
    ]
    any_model.eval()
    with torch.no_grad():
        scores = passkey._score(any_model, tiny_tokenizer, examples, torch.device("cpu"))
        for example, (_, log_probs) in zip(examples, scores, strict=True):
            answer = tiny_tokenizer.encode(passkey.ANSWER.format(key=example.choices[3]))
            ids = torch.tensor([[*example.prompt.tolist(), *answer]])
            hidden, _ = any_model(ids, any_model.initial_state(1))
            every = torch.log_softmax(any_model.logits(hidden[0, 89:-1]), dim=-1)
            want = every.gather(-1, torch.tensor(answer)[:, None]).sum()
            assert float(log_probs[3]) == pytest.approx(float(want), rel=1e-4)


def test_the_same_seed_asks_for_the_same_keys(model: NsmModel, tiny_tokenizer: Tokenizer) -> None:
    first, again, other = (
        measure_passkey(model, tiny_tokenizer, FILLER, lengths=(90,), depths=(0.5,), num_examples=2, seed=seed)
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_prompt_without_room_for_the_key_is_an_error(model: NsmModel, tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"passkey lengths must be above [0-9]+ tokens, got 20"):
        measure_passkey(model, tiny_tokenizer, FILLER, lengths=(20,))
