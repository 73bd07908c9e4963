from __future__ import annotations

import dataclasses

import pytest
import torch

from nsm_core.config import ModelConfig
from nsm_lab.evaluation.mqar.data import Task
from nsm_lab.evaluation.mqar.recorded import RecordedRecall, Recorder
from nsm_lab.evaluation.mqar.train import Recall
from tests.nsm_lab.evaluation.mqar.test_train import TOY, TOY_MODEL

DEVICES = ("cpu", pytest.param("cuda:0", marks=pytest.mark.gpu))

# Two kinds of whole batches and two of what is left over, so that the rows of one task are not there in another.
TASKS = (Task(64, 2, 72), Task(128, 4, 40))


def recalls(pattern: str, router: str, device: str) -> tuple[Recall, Recall]:
    """The same training twice."""
    slots = {"router": router, "num_memory_slots": 32, "write_top_k": 32 if router == "sigmoid" else 4}
    model = ModelConfig.from_dict(
        {**dataclasses.asdict(TOY_MODEL), **slots, "layer_pattern": pattern, "d_model": 64, "max_context": 128}
    )
    config = dataclasses.replace(TOY, model=model, train_tasks=TASKS, device=device, precision="fp32", target=2.0)
    first, second = Recall(config), Recall(config)
    return first, second


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("pattern", "router"),
    [("K", "sigmoid"), ("N", "softmax"), ("N", "sigmoid"), ("g", "sigmoid"), ("r", "sigmoid"), ("m", "sigmoid"),
     ("W", "sigmoid")],
)  # fmt: skip
def test_recorded_steps_train_as_the_plain_ones(pattern: str, router: str, device: str) -> None:
    plain, recorded = recalls(pattern, router, device)
    want = plain.run()
    training = RecordedRecall(recorded, Recorder(device))
    while not training.is_done:
        training.advance()
        training.wait()
    report = training.report()
    assert report.history[-1].train_loss == pytest.approx(want.history[-1].train_loss, rel=1e-3)
    assert [epoch.number for epoch in report.history] == [2]
    for (name, value), other in zip(plain.model.named_parameters(), recorded.model.parameters(), strict=True):
        torch.testing.assert_close(other, value, rtol=1e-2, atol=1e-3, msg=name)
    biases = [name for name, _ in plain.model.named_buffers() if name.endswith(("selection_bias", "slot_load"))]
    assert bool(biases) == (router == "softmax")
    for name in biases:
        torch.testing.assert_close(recorded.model.get_buffer(name), plain.model.get_buffer(name))


@pytest.mark.gpu
def test_two_trainings_on_streams_of_one_device_do_not_touch_each_other() -> None:
    alone, first = recalls("K", "sigmoid", "cuda:0")
    want = alone.run().history[-1].train_loss
    trainings = [RecordedRecall(recall, Recorder("cuda:0")) for recall in (first, recalls("N", "softmax", "cuda:0")[0])]
    while not all(training.is_done for training in trainings):
        for training in trainings:
            training.advance()
        max(trainings, key=lambda training: training.num_waiting).wait()
    assert trainings[0].report().history[-1].train_loss == pytest.approx(want, rel=1e-3)
