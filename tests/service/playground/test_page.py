from __future__ import annotations

import re

import pytest

from service.playground.page import ASSETS_URL, FOLDER, PAGE_NAME
from tests.support.fakes import FakeBackend
from tests.support.gateway import error_of, gateway

NAMES = sorted(path.name for path in FOLDER.iterdir())
TYPES = {"css": "text/css", "html": "text/html", "js": "text/javascript", "svg": "image/svg+xml"}


def urls() -> list[str]:
    return ["/" if name == PAGE_NAME else f"{ASSETS_URL}/{name}" for name in NAMES]


async def test_every_file_has_its_type_and_the_policy() -> None:
    async with gateway(FakeBackend()) as server:
        for name, url in zip(NAMES, urls(), strict=True):
            answer = await server.client.get(url)
            assert answer.content == (FOLDER / name).read_bytes()
            assert answer.headers["content-type"].split(";")[0] == TYPES[name.rpartition(".")[2]]
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'self';")
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"


async def test_a_browser_that_has_a_file_gets_it_no_second_time() -> None:
    async with gateway(FakeBackend()) as server:
        first = await server.client.get("/")
        tag = first.headers["etag"]
        for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
            again = await server.client.get("/", headers={"if-none-match": known})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
            assert again.headers["content-security-policy"]
        assert (await server.client.get("/", headers={"if-none-match": '"other"'})).status_code == 200
        tags = {(await server.client.get(url)).headers["etag"] for url in urls()}
        assert len(tags) == len(NAMES)
        head = await server.client.head("/")
        assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", tag)


@pytest.mark.parametrize("path", ["/playground", "/playground/"])
async def test_the_name_of_the_page_leads_to_it(path: str) -> None:
    async with gateway(FakeBackend()) as server:
        answer = await server.client.get(path)
        assert (answer.status_code, answer.headers["location"]) == (307, "/")
    async with gateway(FakeBackend(), playground=False) as server:
        assert (await server.client.get(path)).status_code == 404


@pytest.mark.parametrize("path", ["/playground/nothing.js", "/playground/index.html", "/playground/%2e%2e/page.py"])
async def test_what_is_no_file_of_the_page_is_404(path: str) -> None:
    async with gateway(FakeBackend()) as server:
        answer = await server.client.get(path)
        assert (answer.status_code, error_of(answer)["type"]) == (404, "not_found_error")
        assert (await server.client.post("/")).status_code == 405


async def test_the_page_can_be_switched_off() -> None:
    async with gateway(FakeBackend(), playground=False) as server:
        assert [(await server.client.get(url)).status_code for url in ("/", "/playground/app.js")] == [404, 404]
        assert (await server.client.get("/v1/models")).status_code == 200


async def test_the_page_is_no_part_of_the_document() -> None:
    async with gateway(FakeBackend()) as server:
        paths = (await server.client.get("/openapi.json")).json()["paths"]
    assert not any(path == "/" or path.startswith("/playground") for path in paths)


def test_the_files_name_no_other_host_and_hold_no_inline_code() -> None:
    for name in NAMES:
        text = (FOLDER / name).read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), name
    page = (FOLDER / PAGE_NAME).read_text("utf-8")
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)", page)


def test_every_import_of_a_script_is_a_file() -> None:
    for name in NAMES:
        for imported in re.findall(r'from "\./([^"]+)"', (FOLDER / name).read_text("utf-8")):
            assert imported in NAMES, (name, imported)


def test_no_script_is_overcrowded() -> None:
    assert [
        name for name in NAMES if name.endswith(".js") and len((FOLDER / name).read_text("utf-8").splitlines()) > 350
    ] == []
