"""/v1/embeddings with the stock client, on engines whose states are real."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import openai
import pytest

from nsm_core.tokenizer import Tokenizer
from tests.support.backends import MakeBackend
from tests.support.fakes import FakeBackend
from tests.support.gateway import error_of, gateway
from tests.support.models import local_backend

TEXTS = ["the cat sat", "the cat sat on", "a dog"]


async def test_the_stock_client_gets_vectors_of_length_one(make_backend: MakeBackend) -> None:
    async with gateway(make_backend(), is_live=True) as server:
        made = await server.openai.embeddings.create(model=server.services.model_name, input=TEXTS)  # asks for base64
        plain = await server.openai.embeddings.create(
            model=server.services.model_name, input=TEXTS, encoding_format="float"
        )
        vectors = np.array([one.embedding for one in made.data])
        assert vectors.shape == (3, 1024)
        assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0, abs=1e-5)
        assert np.array([one.embedding for one in plain.data]) == pytest.approx(vectors, abs=1e-6)
        assert [one.index for one in made.data] == [0, 1, 2]
        tokenizer = server.services.backend.tokenizer
        assert made.usage.prompt_tokens == sum(1 + len(tokenizer.encode(text)) for text in TEXTS)


async def test_a_vector_depends_on_its_own_text_alone(tiny_tokenizer: Tokenizer) -> None:
    async with gateway(local_backend(tiny_tokenizer)) as server:

        async def embed(given: Any, **fields: Any) -> list[Any]:
            response = await server.client.post("/v1/embeddings", json={"input": given, **fields})
            assert response.status_code == 200, response.text
            return [one["embedding"] for one in response.json()["data"]]

        alone, again = (await embed(TEXTS[0]))[0], (await embed(TEXTS * 4))[3]
        assert alone == pytest.approx(again, abs=1e-5)  # the eager executor's bits depend on its batch
        ids = [tiny_tokenizer.end_of_text_id, *tiny_tokenizer.encode(TEXTS[0])]
        for same in (await embed(ids), await embed([ids])):
            assert same == [pytest.approx(alone, abs=1e-5)]
        (short,) = await embed(TEXTS[0], dimensions=7, encoding_format="base64")
        assert len(base64.b64decode(short)) == 4 * 7


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [[1], []]}, "input"),
        ({"input": [1, 10**6]}, "input"),
        ({"input": ["a"] * 257}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 5000}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({}, "input"),
    ],
)
async def test_a_body_that_gives_no_vectors_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with gateway(FakeBackend()) as server:
        refused = await server.client.post("/v1/embeddings", json=fields)
        assert (refused.status_code, error_of(refused)["param"]) == (400, param)


async def test_an_unknown_model_is_404(tiny_tokenizer: Tokenizer) -> None:
    async with gateway(local_backend(tiny_tokenizer), is_live=True) as server:
        with pytest.raises(openai.NotFoundError):
            await server.openai.embeddings.create(model="other", input="a")


@pytest.mark.parametrize(("model", "words"), [("ft:fake-nsm:yes@1", "'fake-nsm'"), ("ft:fake-nsm", "ft:MODEL:NAME")])
async def test_a_tuned_state_is_refused_by_name(model: str, words: str) -> None:
    async with gateway(FakeBackend()) as server:
        response = await server.client.post("/v1/embeddings", json={"input": "x", "model": model})
        error = error_of(response)
        assert (response.status_code, error["param"]) == (400, "model")
        assert words in error["message"]
