from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from nsm_core.errors import ConfigError
from nsm_core.model.nsm import NsmModel
from nsm_core.tokenizer import Tokenizer
from nsm_lab.evaluation.history import keys
from nsm_lab.evaluation.history.key_tasks import KeyTask, make_key_tasks, tasks_from_json, tasks_to_json
from nsm_lab.evaluation.history.keys import measure_keys
from tests.nsm_lab.evaluation.history.memories import Memory, random_texts


def task_of(number: int) -> KeyTask:
    """Keys of two tokens, told after the tokens 3, 1 and 2, which the question ends with too."""
    answers = tuple((10 + (number + choice) % 60, 10 + (number + 7 * choice) % 60) for choice in range(10))
    return KeyTask(needle=(3, 1, 2, *answers[0], 4), question=(5, 3, 1, 2), answers=answers)


TASKS = [task_of(number) for number in range(40)]


def test_keys_oracle_memory_finds_and_writes_every_key() -> None:
    result = measure_keys(
        Memory(8192), random_texts(4, 900), TASKS, reach=100, contexts=(200, 400), distances=(20, 150, 300)
    )
    assert [(cell.context, cell.distance) for cell in result.cells] == [
        (200, 20),
        (200, 150),
        (400, 20),
        (400, 150),
        (400, 300),
    ]
    for cell in result.cells:
        assert cell.is_likeliest.mean == cell.is_written.mean == 1.0
        assert cell.is_likeliest.exceeds(result.chance)
        assert cell.is_beyond_windows == (cell.distance > 100)


def test_keys_model_with_a_window_finds_them_within_it_only() -> None:
    result = measure_keys(
        Memory(100), random_texts(4, 400), TASKS, reach=100, contexts=(400,), distances=(20, 300), prompts=1
    )
    near, far = result.cells
    assert (near.is_likeliest.mean, near.is_written.mean) == (1.0, 1.0)
    assert (far.is_likeliest.mean, far.is_written.mean) == (0.0, 0.0)


def test_keys_memoryless_model_is_at_chance_and_nothing_is_found() -> None:
    blind = Memory(0, noise=True)
    cells = measure_keys(
        blind, random_texts(40, 250), TASKS, reach=0, contexts=(100,), distances=(50,), prompts=2
    ).cells
    assert cells[0].num_prompts == 80
    assert 0.02 < cells[0].is_likeliest.mean < 0.25
    assert not cells[0].is_likeliest.exceeds(0.1)
    assert not cells[0].is_written.exceeds(0.0)


def test_keys_probabilities_are_those_of_a_prompt_read_whole(any_model: NsmModel) -> None:
    (tokens,) = random_texts(1, 120)
    tokens = tokens % any_model.config.vocab_size
    task = TASKS[3]
    prompt = tokens.copy()
    prompt[120 - 70 - len(task.needle) : 120 - 70] = task.needle
    prompt[-len(task.question) :] = task.question
    with torch.no_grad():
        any_model.eval()
        want = [_log_prob(any_model, prompt.tolist(), answer) for answer in task.answers]
        ids = torch.from_numpy(tokens)[None]
        ((_, (is_likeliest, _)),) = keys._answers(any_model, ids, [task], [70])
    assert bool(is_likeliest[0]) == (want[0] == max(want))
    likeliest = dataclasses.replace(
        task, answers=tuple(sorted(task.answers, key=lambda one: -want[task.answers.index(one)]))
    )
    with torch.no_grad():
        ((_, (is_likeliest, _)),) = keys._answers(
            any_model, ids, [dataclasses.replace(likeliest, needle=task.needle)], [70]
        )
    assert bool(is_likeliest[0])


def _log_prob(model: NsmModel, prompt: list[int], answer: tuple[int, ...]) -> float:
    ids = torch.tensor([[*prompt, *answer]])
    hidden, _ = model(ids, model.initial_state(1))
    log_probs = torch.log_softmax(model.logits(hidden[0, len(prompt) - 1 : -1]), dim=-1)
    return float(log_probs.gather(-1, torch.tensor(answer)[:, None]).sum())


def test_keys_without_room_are_an_error() -> None:
    with pytest.raises(ConfigError, match="no document and no context is long enough for a key"):
        measure_keys(Memory(0), random_texts(1, 50), TASKS, reach=0, contexts=(100,), distances=(20,))
    uneven = [TASKS[0], dataclasses.replace(TASKS[1], question=(5, 6, 3, 1, 2))]
    with pytest.raises(ConfigError, match="key tasks must all have equally many tokens, got 2 different lengths"):
        measure_keys(Memory(0), random_texts(1, 50), uneven, reach=0)


def test_key_tasks_have_equal_lengths_and_survive_json(tiny_tokenizer: Tokenizer) -> None:
    tasks = make_key_tasks(tiny_tokenizer.encode, 5, seed=1)
    assert len({(len(task.needle), len(task.question), *map(len, task.answers)) for task in tasks}) == 1
    assert all(len(set(task.answers)) == 10 for task in tasks)
    assert tiny_tokenizer.decode(list(tasks[0].answers[0])).strip() in tiny_tokenizer.decode(list(tasks[0].needle))
    assert tasks_from_json(tasks_to_json(tasks)) == tasks
    assert json.loads(tasks_to_json(tasks))[0]["question"] == list(tasks[0].question)
    assert make_key_tasks(tiny_tokenizer.encode, 5, seed=1) == tasks != make_key_tasks(tiny_tokenizer.encode, 5, seed=2)


def test_key_tasks_with_too_few_keys_of_one_length_are_an_error() -> None:
    lengths = iter(range(1_000_000))
    with pytest.raises(ConfigError, match="of 2000 keys only 1 have equally many tokens"):
        make_key_tasks(lambda text: [0] * next(lengths), 1)
