from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nsm_core.config import EngineConfig
from nsm_core.engine.engine import Engine
from nsm_core.engine.request import Finished, GenerationRequest, TokenEvent
from nsm_core.model.loader import load_checkpoint
from nsm_core.sampling.params import SamplingParams
from tests.service.cli.conftest import NSM, Nsm, assert_one_line

PROMPT = "It was the best of times,"


def by_the_engine(model_dir: Path, prompt: str, **options: Any) -> str:
    """What the engine writes when it is asked directly."""
    sampling = SamplingParams(**{"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, **options})
    loaded = load_checkpoint(model_dir)
    engine = Engine(loaded.model, loaded.tokenizer, fingerprint=loaded.fingerprint, config=EngineConfig())
    ids = (loaded.tokenizer.end_of_text_id, *loaded.tokenizer.encode(prompt))
    engine.add(GenerationRequest(request_id="r", prompt_ids=ids, sampling=sampling))
    text = ""
    while engine.has_work:
        for _, event in engine.step():
            if isinstance(event, TokenEvent | Finished):
                text += event.text
    return text


def test_M5_a_seed_decides_the_text(nsm: Nsm, model_dir: Path) -> None:
    texts = [nsm("generate", PROMPT, "--seed", seed, "--max-tokens", 30).stdout for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]
    expected = by_the_engine(model_dir, PROMPT, seed=7, max_tokens=30)
    assert texts[0] == expected + ("" if expected.endswith("\n") else "\n")


def test_drawn_seed_is_printed(nsm: Nsm) -> None:
    first = json.loads(nsm("generate", PROMPT, "--max-tokens", 20, "--json").stdout)
    again = json.loads(nsm("generate", PROMPT, "--max-tokens", 20, "--json", "--seed", first["seed"]).stdout)
    other = json.loads(nsm("generate", PROMPT, "--max-tokens", 20, "--json").stdout)
    assert again == first
    assert other["seed"] != first["seed"]


def test_json_output_has_usage(nsm: Nsm, model_dir: Path) -> None:
    answer = json.loads(nsm("generate", PROMPT, "--max-tokens", 5, "--ignore-eos", "--seed", 1, "--json").stdout)
    loaded = load_checkpoint(model_dir)
    prompt_tokens = 1 + len(loaded.tokenizer.encode(PROMPT))
    assert answer == {
        "text": by_the_engine(model_dir, PROMPT, seed=1, max_tokens=5, ignore_eos=True),
        "finish_reason": "length",
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 5,
            "total_tokens": prompt_tokens + 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "seed": 1,
        "model": "tiny",
        "model_fingerprint": loaded.fingerprint,
    }


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ((), {}),
        (("--temperature", 0), {"temperature": 0.0}),
        (("--top-p", 0.5, "--top-k", 9), {"top_p": 0.5, "top_k": 9}),
        (("--min-p", 0.3), {"min_p": 0.3}),
        (("--repetition-penalty", 1.5), {"repetition_penalty": 1.5}),
        (("--presence-penalty", 1, "--frequency-penalty", -1), {"presence_penalty": 1.0, "frequency_penalty": -1.0}),
        (("--stop", "e", "--stop", "zz"), {"stop": ("e", "zz")}),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_options_reach_the_sampler(
    nsm: Nsm, model_dir: Path, options: tuple[str | float, ...], sampling: dict[str, object]
) -> None:
    given = json.loads(nsm("generate", PROMPT, "--seed", 3, "--max-tokens", 40, "--json", *options).stdout)
    assert given["text"] == by_the_engine(model_dir, PROMPT, seed=3, max_tokens=40, **sampling)


def test_a_dash_reads_the_prompt_from_standard_input(nsm: Nsm) -> None:
    options = ("--seed", 1, "--max-tokens", 10)
    expected = nsm("generate", "two\nlines", *options).stdout
    assert nsm("generate", "-", *options, stdin="two\nlines\n").stdout == expected
    assert nsm("generate", "-", *options, stdin="two\nlines\n\n").stdout != expected


def test_an_empty_prompt_starts_a_text(nsm: Nsm) -> None:
    answer = json.loads(nsm("generate", "", "--max-tokens", 1, "--json").stdout)
    assert answer["usage"]["prompt_tokens"] == 1


def test_input_that_is_not_text_is_refused(nsm: Nsm) -> None:
    result = nsm("generate", "-", stdin=b"good \xff bad")
    assert_one_line(result, "the input is not valid utf-8: invalid start byte at byte 5")


def test_a_prompt_over_the_limit_is_refused(nsm: Nsm) -> None:
    result = nsm("generate", "a b c d e f g", NSM_MAX_PROMPT_TOKENS="5")
    assert_one_line(result, "prompt must have at most 5 tokens, got 7")
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--top-p", 0, "Invalid value for '--top-p': must be in (0, 1], got 0.0"),
        ("--temperature", "nan", "Invalid value for '--temperature': must be in [0, 2], got nan"),
        ("--max-tokens", 0, "Invalid value for '--max-tokens': must be a whole number of at least 1, got 0"),
        ("--seed", -1, f"Invalid value for '--seed': must be a whole number in [0, {2**64 - 1}], got -1"),
        ("--repetition-penalty", 0, "Invalid value for '--repetition-penalty': must be in (0, 10], got 0.0"),
        ("--stop", "", "Invalid value for '--stop': must be made of non-empty strings, got [\"\"]"),
    ],
)
def test_a_bad_value_names_its_option(nsm: Nsm, option: str, value: object, message: str) -> None:
    assert_one_line(nsm("generate", PROMPT, option, value), message, status=2)


def test_a_reader_that_leaves_ends_it_quietly() -> None:
    command = [*NSM, "generate", PROMPT, "--max-tokens", "100000", "--ignore-eos"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


def test_ctrl_c_ends_it_cleanly() -> None:
    command = [*NSM, "generate", PROMPT, "--max-tokens", "100000", "--ignore-eos"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert out.endswith(b"\n")
    assert err == b""
    assert process.returncode == 130


@pytest.mark.slow
def test_the_bundled_model_writes_english(nsm: Nsm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NSM_MODEL")
    answer = json.loads(nsm("generate", "It was a dark night, and", "--seed", 1, "--json").stdout)
    words = re.findall(r"[a-z]+", answer["text"].lower())
    common = {"the", "and", "of", "to", "a", "in", "was", "he", "it", "i", "that", "with", "his", "as", "her", "had"}
    assert sum(word in common for word in words) > 0.2 * len(words)  # about a third in English prose
