"""/v1/files with the stock client, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from service.files.stored_files import PIECE_BYTES
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, error_of, gateway
from tests.support.tenants import make_key, write_keys


@pytest.fixture
async def server() -> AsyncIterator[Gateway]:
    async with gateway(FakeBackend(), is_live=True) as made:
        yield made


@pytest.mark.parametrize(
    "raw", [b"{}\n", bytes(range(256)) * 3000, b"x" * PIECE_BYTES, b"y" * (2 * PIECE_BYTES + 1), b""]
)
async def test_the_stock_client_sends_a_file_and_reads_it_again(server: Gateway, raw: bytes) -> None:
    files = server.openai.files
    made = await files.create(file=("in.jsonl", raw), purpose="batch")
    assert (made.bytes, made.filename, made.purpose, made.status) == (len(raw), "in.jsonl", "batch", "processed")
    assert (await files.content(made.id)).content == raw
    assert (await files.retrieve(made.id)) == made
    assert (await files.delete(made.id)).deleted
    for gone in (files.retrieve(made.id), files.content(made.id), files.delete(made.id)):
        with pytest.raises(openai.NotFoundError) as missing:
            await gone
        assert missing.value.code == "file_not_found"


async def test_files_are_listed_in_pages_and_by_purpose(server: Gateway) -> None:
    files = server.openai.files
    made = [await files.create(file=(f"{name}.txt", b"x"), purpose="user_data") for name in "abc"]
    await files.create(file=("d.jsonl", b"x"), purpose="fine-tune")
    listed = [file.filename async for file in files.list(purpose="user_data", limit=2)]
    assert listed == ["c.txt", "b.txt", "a.txt"]
    assert [file.id async for file in files.list(purpose="user_data", order="asc")] == [file.id for file in made]
    assert (await anext(aiter(files.list(limit=1)))).filename == "d.jsonl"


async def test_a_file_expires_when_its_client_says_so(server: Gateway) -> None:
    expires: Any = {"anchor": "created_at", "seconds": 3600}
    made = await server.openai.files.create(file=("a", b"x"), purpose="batch", expires_after=expires)
    assert made.expires_at == made.created_at + 3600
    short: Any = {"anchor": "created_at", "seconds": 5}
    with pytest.raises(openai.BadRequestError) as refused:
        await server.openai.files.create(file=("a", b"x"), purpose="batch", expires_after=short)
    assert refused.value.param == "expires_after[seconds]"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"files": {"purpose": (None, "batch")}}, "file"),
        ({"files": {"file": ("a", b"x")}}, "purpose"),
        ({"files": {"file": ("a", b"x")}, "data": {"purpose": "vision"}}, "purpose"),
        ({"files": {"file": ("a", b"x")}, "data": {"purpose": "batch", "colour": "red"}}, "colour"),
    ],
)
async def test_a_form_with_a_wrong_field_is_refused_by_name(
    server: Gateway, fields: dict[str, Any], param: str
) -> None:
    refused = await server.client.post("/v1/files", **fields)
    assert (refused.status_code, error_of(refused)["param"]) == (400, param)


async def test_files_belong_to_their_tenant_and_count_in_its_quota(tmp_path: Path) -> None:
    acme, rival = make_key("acme"), make_key("rival")
    path = write_keys(tmp_path / "keys.toml", acme, rival, acme="max_stored_bytes = 100000", rival="")
    async with gateway(FakeBackend(), api_keys_file=path) as server:

        async def send(raw: bytes) -> Any:
            form: dict[str, Any] = {"files": {"file": ("a", raw)}, "data": {"purpose": "batch"}}
            return await server.client.post("/v1/files", headers=acme.headers, **form)

        made = (await send(b"x" * 60_000)).json()
        refused = await send(b"x" * 60_000)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "quota_exceeded")
        others = await server.client.get(f"/v1/files/{made['id']}", headers=rival.headers)
        assert others.status_code == 404
        assert (await server.client.get("/v1/files", headers=rival.headers)).json()["data"] == []
        await server.client.delete(f"/v1/files/{made['id']}", headers=acme.headers)
        assert (await send(b"x" * 60_000)).status_code == 200


async def test_uploads_have_a_limit_of_their_own() -> None:
    async with gateway(FakeBackend(), max_body_bytes=2_000, max_file_bytes=20_000) as server:
        for num_bytes, status in ((10_000, 200), (30_000, 413)):
            files, data = {"file": ("f.jsonl", b"x" * num_bytes)}, {"purpose": "user_data"}
            assert (await server.client.post("/v1/files", files=files, data=data)).status_code == status
        body = {"prompt": "x" * 10_000}
        assert (await server.client.post("/v1/completions", json=body)).status_code == 413
