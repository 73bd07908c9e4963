from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.fakes import FakeBackend
from tests.support.gateway import gateway
from tests.support.tenants import make_key, write_keys


async def test_the_docs_page_loads_nothing_from_other_hosts() -> None:
    async with gateway(FakeBackend()) as server:
        page = await server.client.get("/docs")
        links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert links
        assert all(link.startswith("/docs/assets/") for link in links)
        assert "http://" not in page.text.replace("http://www.w3.org", "")
        assert "https://" not in page.text
        assert page.headers["content-security-policy"].startswith("default-src 'self'")
        for link in links:
            assert (await server.client.get(link)).status_code == 200


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


async def test_other_origins_may_not_read_answers() -> None:
    async with gateway(FakeBackend()) as server:
        answer = await server.client.get("/v1/models", headers={"origin": "https://elsewhere.example"})
    assert "access-control-allow-origin" not in answer.headers
    assert answer.headers["x-content-type-options"] == "nosniff"
