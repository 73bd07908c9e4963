"""The Python of a step with a prompt, measured on a device that computes nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("triton", reason="the compiler is not installed")
from benchmarks import gpu_prompts
from benchmarks.no_device import TOKEN, Clock, no_device
from nsm_core.model.bundled import CHECKPOINTS
from nsm_core.sampling.device import launch_on_device

ROWS, PROMPTS = 40, 3  # rows of which steps overlap
SMALL = [
    f"--model={CHECKPOINTS / 'pulse-books-small'}",
    "--tiny",
    "--slots=64",
    f"--rows={ROWS}",
    f"--prompts={PROMPTS}",
]
GATEWAYS = [
    "--connections=2",
    "--row-tokens=40",
    "--gateway-prompts=1",
    "--switch-ms=0.5",
    "--repeats=1",
    "--busy",
    "0.5",
]


def test_each_prompt_is_one_launch_in_a_step_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_prompts, "HAS_GPU", False)
    result = gpu_prompts.main([*SMALL, *GATEWAYS, "--pieces", "1x100", "2x64"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == json.loads(json.dumps(result))
    asked = [(row["prompts"], row["length"], row["busy"]) for row in result["steps"]]
    assert asked == [(1, 100, 0.0), (2, 64, 0.0), (2, 64, 0.5)]
    for row in result["steps"]:
        assert row["prompt"]["number"] == row["behind"]["number"] == PROMPTS
        assert {"plan", "admit", "decode", "prompts", "logits", "choose", "wait", "apply"} <= set(
            row["prompt"]["stages"]
        )
        assert row["prompt"]["span"] is None
    assert result["launches"]["graph of PromptReader._read_rows"] == 2 * PROMPTS
    assert result["calls"]["with a prompt"]["ops"] > result["calls"]["without"]["ops"] > 0
    plain, with_prompts = result["beside"]
    assert (plain["prompt_ms"], len(with_prompts["prompt_ms"])) == (None, 2)
    assert with_prompts["largest_gaps"]


def test_a_timeline_leaves_the_engine_as_it_was() -> None:
    with no_device():
        subject = gpu_prompts.make_subject(CHECKPOINTS / "pulse-books-small", 8, is_tiny=True)
        before = [dict(vars(part)) for part in (subject.engine, subject.executor, subject.engine._runner)]
        gpu_prompts.Timeline(subject.engine, subject.executor).close()
        assert [dict(vars(part)) for part in (subject.engine, subject.executor, subject.engine._runner)] == before


def test_tokens_of_no_device_come_when_the_graphs_before_them_would_have_ended() -> None:
    clock = Clock(free_at=0.0)
    with no_device(clock):
        pending = launch_on_device(gpu_prompts.torch.zeros(3, 9), np.zeros((3, 7), np.int64))
        assert pending.wait().tolist() == [[TOKEN] * 3]
        clock.free_at = gpu_prompts.time.perf_counter() + 0.05
        launch_on_device(gpu_prompts.torch.zeros(1, 9), np.zeros((1, 7), np.int64)).wait()
        assert gpu_prompts.time.perf_counter() >= clock.free_at
