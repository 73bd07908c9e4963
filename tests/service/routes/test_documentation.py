from __future__ import annotations

import re

from tests.support.fakes import FakeBackend
from tests.support.gateway import gateway


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


async def test_other_origins_may_not_read_answers() -> None:
    async with gateway(FakeBackend()) as server:
        answer = await server.client.get("/v1/models", headers={"origin": "https://elsewhere.example"})
    assert "access-control-allow-origin" not in answer.headers
    assert answer.headers["x-content-type-options"] == "nosniff"
