"""Client libraries, unmodified, get typed answers from a server: by schemas and by tools."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from nsm_core.tokenizer import Tokenizer
from tests.support.gateway import gateway
from tests.support.models import local_backend

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = REPOSITORY / ".venv" / "clients" / "bin" / "python"
ASK = REPOSITORY / "tests" / "clients" / "ask.py"
NUM_ANSWERS = {"instructor": 2, "pydantic_ai": 2, "langchain": 3}

pytestmark = [
    pytest.mark.other_library,
    pytest.mark.skipif(not PYTHON.exists(), reason="`make clients` installs the client libraries"),
]


@pytest.mark.parametrize("library", NUM_ANSWERS)
async def test_a_client_library_gets_typed_answers(library: str, tiny_tokenizer: Tokenizer) -> None:
    async with gateway(local_backend(tiny_tokenizer), is_live=True) as server:
        process = await asyncio.create_subprocess_exec(
            *(str(PYTHON), str(ASK), f"{server.url}/v1", library),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, log = await process.communicate()
    assert process.returncode == 0, log.decode()
    answers = json.loads(out)
    assert len(answers) == NUM_ANSWERS[library]
    for book in answers.values():
        assert set(book) == {"title", "kind", "year"}
