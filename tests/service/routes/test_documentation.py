from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from service.schemas import answers
from service.web.examples import ANSWERS, REQUESTS
from service.web.openapi import DescribedApi, ErrorBody
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, gateway
from tests.support.tenants import make_key, write_keys


async def test_the_docs_page_loads_nothing_from_other_hosts() -> None:
    async with gateway(FakeBackend()) as server:
        page = await server.client.get("/docs")
        links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert links
        assert links.pop(links.index("./")) == "./"  # the playground
        assert all(link.startswith("/docs/assets/") for link in links)
        assert "http://" not in page.text.replace("http://www.w3.org", "")
        assert "https://" not in page.text
        assert page.headers["content-security-policy"].startswith("default-src 'self'")
        for link in links:
            assert (await server.client.get(link)).status_code == 200


async def test_the_description_is_made_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    made_in = []
    openapi = DescribedApi.openapi

    def noted(app: DescribedApi) -> dict[str, Any]:
        made_in.append(threading.current_thread())
        return openapi(app)

    monkeypatch.setattr(DescribedApi, "openapi", noted)
    async with gateway(FakeBackend()) as server:
        first, second = await asyncio.gather(*(server.client.get("/openapi.json") for _ in range(2)))
    assert first.json() == second.json()
    assert first.json()["components"]["securitySchemes"]
    assert len(made_in) == 2
    assert threading.main_thread() not in made_in


async def test_the_schema_documents_bodies_and_errors() -> None:
    async with gateway(FakeBackend()) as server:
        schema = (await server.client.get("/openapi.json")).json()
    operations = [operation for path in schema["paths"].values() for operation in path.values()]
    for operation in operations:
        assert "422" not in operation["responses"], "this server answers 400"
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/sessions/{session_id}/generate"):
        responses = schema["paths"][path]["post"]["responses"]
        assert responses["4XX"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorBody"}
        assert "text/event-stream" in responses["200"]["content"]
    fields = schema["components"]["schemas"]["CompletionBody"]["properties"]
    assert fields["prompt"]["anyOf"][0] == {"type": "string"}
    assert fields["temperature"]["description"] == "0 is greedy; at most 2"
    assert fields["top_k"]["description"] == "0 means all tokens, and so does -1; at most 2147483647"
    assert "[-2^63, 2^64)" in fields["seed"]["description"]
    assert schema["components"]["schemas"]["CompletionBody"]["additionalProperties"] is False


async def test_X8_the_first_type_of_an_answer_is_json_where_there_is_one() -> None:
    async with gateway(FakeBackend()) as server:
        schema = (await server.client.get("/openapi.json")).json()
    operations = {
        (method, path): operation for path, methods in schema["paths"].items() for method, operation in methods.items()
    }
    types = {key: list(operation["responses"]["200"]["content"]) for key, operation in operations.items()}
    assert {key for key, names in types.items() if "application/json" in names[1:]} == set()
    assert sum("text/event-stream" in names for names in types.values()) == 6


@pytest.mark.parametrize("has_keys", [False, True])
async def test_X8_the_description_has_servers_keys_and_summaries(has_keys: bool, tmp_path: Path) -> None:
    file = write_keys(tmp_path / "keys", make_key("acme"), acme="") if has_keys else None
    async with gateway(FakeBackend(), api_keys_file=file) as server:
        schema = (await server.client.get("/openapi.json")).json()
    assert schema["servers"] == [{"url": "/"}]
    ((name, scheme),) = schema["components"]["securitySchemes"].items()
    assert scheme == {"type": "http", "scheme": "bearer"}
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            assert operation["summary"]
            wanted = [{name: []}] if has_keys else [{}, {name: []}]
            assert operation.get("security") == (None if path.startswith("/health") else wanted)


async def test_every_operation_has_a_summary_of_its_own_and_an_example_of_each_body() -> None:
    async with gateway(FakeBackend()) as server:
        schema = (await server.client.get("/openapi.json")).json()
    schemas = schema["components"]["schemas"]
    operations = [(path, operation) for path, methods in schema["paths"].items() for operation in methods.values()]
    lacking = [
        (path, name)
        for path, operation in operations
        for name in (*names_in(operation.get("requestBody", {})), *names_in(operation["responses"]["200"]))
        if "examples" not in schemas[name]
    ]
    assert lacking == []  # service/web/examples.py
    summaries = Counter(operation["summary"] for path, operation in operations if path != "/health")
    assert [summary for summary, count in summaries.items() if count > 1 or summary.endswith(".")] == []


async def test_every_type_of_a_body_has_an_example_that_is_accepted() -> None:
    """Of JSON bodies see test_an_example_is_accepted."""
    async with gateway(FakeBackend()) as server:
        schema = (await server.client.get("/openapi.json")).json()
        await prepared(server)
        await server.client.post("/v1/states", json=REQUESTS["CreateStateBody"])
        given = {"/v1/sessions/import": {"id": "again"}, "/v1/states/import": {"name": "again"}}
        seen = []
        for path, methods in schema["paths"].items():
            for method, operation in methods.items():
                for kind, content in operation.get("requestBody", {}).get("content", {}).items():
                    if kind == "application/json":
                        assert names_in(operation["requestBody"]), path
                        continue
                    seen.append((path, kind))
                    url = path.replace("{session_id}", "harbour")
                    response = await server.client.request(
                        method, url, params=given.get(path), **await sent(server, kind, content)
                    )
                    assert response.status_code == 200, response.text
    assert len(seen) == 5


async def sent(server: Gateway, kind: str, content: dict[str, Any]) -> dict[str, Any]:
    """The example of a type of body, as a client sends it."""
    if kind == "multipart/form-data":
        fields = dict(content["example"])
        return {"files": {"file": ("in.jsonl", fields.pop("file").encode())}, "data": fields}
    if "examples" in content:
        (example,) = content["examples"].values()
        raw = (await server.client.get(example["externalValue"])).content
    else:
        raw = content["example"].encode()
    return {"content": raw, "headers": {"content-type": kind}}


def names_in(part: dict[str, Any]) -> set[str]:
    """Of the schemas that a request body or an answer refers to."""
    return set(re.findall(r"#/components/schemas/(\w+)", json.dumps(part.get("content", {}))))


async def test_examples_of_answers_have_the_fields_of_their_models() -> None:
    for name, example in ANSWERS.items():
        model = ErrorBody if name == "ErrorBody" else getattr(answers, name)
        model.model_validate(example)


@pytest.mark.parametrize("name", REQUESTS)
async def test_an_example_is_accepted(name: str, tmp_path: Path) -> None:
    async with gateway(FakeBackend(), fine_tuning_jobs=1, data_dir=tmp_path) as server:
        schema = (await server.client.get("/openapi.json")).json()
        ids = {"{session_id}": "harbour", "{conversation_id}": await prepared(server)}
        found = [
            (method, path)
            for path, methods in schema["paths"].items()
            for method, operation in methods.items()
            if name in names_in(operation.get("requestBody", {}))
        ]
        assert found
        for method, path in found:
            for part, value in ids.items():
                path = path.replace(part, value)
            if name == "CreateSessionBody":
                await server.client.delete("/v1/sessions/harbour")
            body = REQUESTS[name]
            if name == "CreateBatchBody":
                file = await server.services.files.create("default", b"{}", filename="in.jsonl", purpose="batch")
                body = {**body, "input_file_id": file.id}
            if name == "CreateJobBody":
                file = await server.services.files.create("default", b"{}", filename="in.jsonl", purpose="fine-tune")
                body = {**body, "training_file": file.id, "model": server.services.model_name}
            response = await server.client.request(method, path, json=body)
            assert response.status_code == 200, response.text


async def prepared(server: Gateway) -> str:
    """The session that the examples name, with a turn of two, and a conversation's id."""
    await server.client.post("/v1/sessions", json=REQUESTS["CreateSessionBody"])
    for _ in range(2):
        turn = {"input": "Hello", "max_tokens": 4}
        assert (await server.client.post("/v1/sessions/harbour/generate", json=turn)).status_code == 200
    return str((await server.client.post("/v1/conversations")).json()["id"])


async def test_other_origins_may_not_read_answers() -> None:
    async with gateway(FakeBackend()) as server:
        answer = await server.client.get("/v1/models", headers={"origin": "https://elsewhere.example"})
    assert "access-control-allow-origin" not in answer.headers
    assert answer.headers["x-content-type-options"] == "nosniff"
