"""lm-eval, unmodified, measures a server: what it reports is what the model itself gives for the same items."""

from __future__ import annotations

import asyncio
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from nsm_core.tokenizer import Tokenizer
from tests.support.gateway import gateway
from tests.support.models import RandomModel, local_backend

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = REPOSITORY / ".venv" / "clients" / "bin" / "python"
PROGRAM = REPOSITORY / "tests" / "clients" / "evaluate.py"
LINES = (REPOSITORY / "tests" / "clients" / "lm_eval_tasks" / "items.jsonl").read_text("utf-8").splitlines()
ITEMS = [json.loads(line) for line in LINES]
MAX_TOKENS = 8  # as words.yaml says

pytestmark = [
    pytest.mark.other_library,
    pytest.mark.skipif(not PYTHON.exists(), reason="`make clients` installs the client libraries"),
]


async def evaluate(url: str, folder: Path, *tasks: str, **options: Any) -> dict[str, Any]:
    """What tests/clients/evaluate.py writes; lm-eval keeps its files in `folder` and asks no hub."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder), "NO_PROXY": "127.0.0.1"}
    process = await asyncio.create_subprocess_exec(
        *(str(PYTHON), str(PROGRAM), f"{url}/v1", json.dumps(options), *tasks),
        cwd=REPOSITORY,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, log = await process.communicate()
    assert process.returncode == 0, log.decode()
    return dict(json.loads(out.splitlines()[-1]))


def log_probs(model: RandomModel, ids: list[int]) -> torch.Tensor:
    """Of every token after ids[:t+1], fp32 [T,V]: one forward pass over the whole text."""
    hidden, _ = model.forward(torch.tensor([ids]), model.initial_state(1))
    return model.logits(hidden)[0].log_softmax(-1)


def likelihood(model: RandomModel, ids: list[int], start: int) -> float:
    """The log-likelihood of ids[start:] after what stands before them."""
    rows = log_probs(model, ids)[:-1]
    return float(rows.gather(-1, torch.tensor(ids[1:])[:, None])[start - 1 :].sum())


def greedy_text(model: RandomModel, tokenizer: Tokenizer, ids: list[int]) -> str:
    """Up to a full stop, the end of the text, or MAX_TOKENS."""
    written: list[int] = []
    for _ in range(MAX_TOKENS):
        token_id = int(log_probs(model, [*ids, *written])[-1].argmax())
        if token_id == tokenizer.end_of_text_id:
            break
        written.append(token_id)
    return tokenizer.decode(written).partition(".")[0]


def choice_likelihoods(model: RandomModel, tokenizer: Tokenizer, item: dict[str, Any]) -> list[float]:
    context = [tokenizer.end_of_text_id, *tokenizer.encode(item["text"])]
    texts = [f"{item['text']} {choice}" for choice in item["choices"]]
    return [likelihood(model, [tokenizer.end_of_text_id, *tokenizer.encode(text)], len(context)) for text in texts]


async def test_choices_and_words_get_the_models_own_scores(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = RandomModel(tiny_tokenizer.vocab_size)
    async with gateway(local_backend(tiny_tokenizer), is_live=True) as server:
        tasks = ("nsm_choices", "nsm_words")
        answers = await evaluate(server.url, tmp_path, *tasks, tokenized_requests=False)
    expected = [choice_likelihoods(model, tiny_tokenizer, item) for item in ITEMS]
    for found, wanted in zip(answers["nsm_choices"]["items"], expected, strict=True):
        assert [likelihood for likelihood, _ in found] == pytest.approx(wanted, abs=1e-3)
    right = [wanted.index(max(wanted)) == item["label"] for wanted, item in zip(expected, ITEMS, strict=True)]
    assert answers["nsm_choices"]["metrics"]["acc,none"] == sum(right) / len(right)
    starts = [[tiny_tokenizer.end_of_text_id, *tiny_tokenizer.encode(item["text"])] for item in ITEMS]
    texts = [[greedy_text(model, tiny_tokenizer, ids)] for ids in starts]
    assert answers["nsm_words"]["items"] == texts


async def test_whole_texts_after_the_end_of_text_token_get_the_models_own_bits_per_byte(
    tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = RandomModel(tiny_tokenizer.vocab_size)
    start = tiny_tokenizer.end_of_text_id
    async with gateway(local_backend(tiny_tokenizer), is_live=True) as server:
        answers = await evaluate(server.url, tmp_path, "nsm_texts", custom_prefix_token_id=start)
    expected = [likelihood(model, [start, *tiny_tokenizer.encode(item["text"])], 1) for item in ITEMS]
    assert [found for (found,) in answers["nsm_texts"]["items"]] == pytest.approx(expected, abs=1e-3)
    num_bytes = sum(len(item["text"].encode()) for item in ITEMS)
    wanted = -sum(expected) / num_bytes / math.log(2)
    assert answers["nsm_texts"]["metrics"]["bits_per_byte,none"] == pytest.approx(wanted, rel=1e-5)
