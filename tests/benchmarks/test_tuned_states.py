from __future__ import annotations

from benchmarks.tuned_states import Item, Measured, Task
from nsm_core.tokenizer import Tokenizer
from nsm_core.tuning.loss import rows_of, summed_loss
from nsm_core.tuning.start import after_start_token
from tests.support.tuning import tunable


def test_right_answers_are_those_with_the_least_loss_of_all_labels(tiny_tokenizer: Tokenizer) -> None:
    measured = Measured(tunable("KW", tiny_tokenizer), max_tokens=64)
    labels = (" a", " three", " twenty-one")
    items = [Item(f"Say {index}:", labels[index % 3]) for index in range(9)]
    state, num_right = after_start_token(measured.loaded), 0
    for item in items:
        losses = []
        for label in labels:
            (example,) = measured.examples([Item(item.prompt, label)])
            end = len(example.ids) - 1  # without end of text
            rows = rows_of([type(example)(1, example.ids[:end], example.targets[:-1])], measured.loaded.device)
            losses.append(float(summed_loss(measured.model, state, rows)))
        num_right += labels[losses.index(min(losses))] == item.label
    task = Task("say", labels, items, items, items)
    assert measured.accuracy(state, task, items) == num_right / len(items)
