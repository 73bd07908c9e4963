"""Samples of generated text on the first pages are what the default model writes. Its native executor gives equal bits
on every processor."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from nsm_core.config import EngineConfig
from nsm_core.execution.native.library import variants
from nsm_core.model.loader import open_checkpoint
from service.backends.local import LocalBackend
from tests.support.gateway import Gateway, gateway

pytestmark = pytest.mark.skipif(not variants(), reason="the native kernels were not built: there is no C++ compiler")

ROOT = Path(__file__).resolve().parent.parent
DEFAULTS_OF_GENERATE = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1}
CURL = re.compile(r"/v1/completions .*\n +-d '(?P<body>\{.*\})'\n\{.*?\"text\":\"(?P<text>[^\"]*?)…")
STREAM = re.compile(
    r"completions\.create(?P<call>\(.*?\n\))\n.*?\$ \.venv/bin/python hello\.py \$URL\n(?P<text>.*?)…", re.DOTALL
)
GENERATE = re.compile(
    r'\$ nsm generate "(?P<prompt>.*?)" --seed (?P<seed>\d+) --max-tokens (?P<max>\d+)\n(?P<text>.*?)\n```', re.DOTALL
)


@pytest.fixture
async def server() -> AsyncIterator[Gateway]:
    """The default model, as `nsm serve` computes it on a CPU."""
    async with gateway(LocalBackend(open_checkpoint(), EngineConfig())) as opened:
        yield opened


def found(pattern: re.Pattern[str], page: str) -> re.Match[str]:
    match = pattern.search((ROOT / page).read_text("utf-8"))
    assert match, f"{page} has no sample"
    return match


async def text_of(server: Gateway, body: dict[str, Any]) -> str:
    response = await server.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


async def test_M5_readme_has_the_text_that_its_request_gets(server: Gateway) -> None:
    sample = found(CURL, "README.md")
    shown = json.loads(f'"{sample["text"]}"')
    assert len(shown) > 20
    assert (await text_of(server, json.loads(sample["body"]))).startswith(shown)


async def test_M5_quickstart_has_the_text_that_its_program_prints(server: Gateway) -> None:
    sample = found(STREAM, "docs/quickstart.md")
    call = ast.parse(f"create{sample['call']}", mode="eval").body
    assert isinstance(call, ast.Call)
    body = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    assert len(sample["text"]) > 20
    assert (await text_of(server, {**body, "stream": False})).startswith(sample["text"])


async def test_M5_page_of_the_commands_has_the_text_that_generate_writes(server: Gateway) -> None:
    sample = found(GENERATE, "docs/cli.md")
    asked = {"prompt": sample["prompt"], "seed": int(sample["seed"]), "max_tokens": int(sample["max"])}
    assert await text_of(server, {**DEFAULTS_OF_GENERATE, **asked}) == sample["text"]
