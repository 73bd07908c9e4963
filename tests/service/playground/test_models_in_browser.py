"""The playground of a server with several models: one is chosen, and whatever a session asks is asked of its own."""

from __future__ import annotations

import pytest
from playwright.async_api import Browser, expect

from nsm_core.state.quantize import StateFormat
from service.named_states.tuned import SOURCE, tuned_file
from tests.service.playground.test_sessions_in_browser import heads
from tests.service.routes.test_several_models import FIRST, Shelf, serving
from tests.support.browsers import playground
from tests.support.fakes import FakeBackend, state_after
from tests.support.gateway import gateway

pytestmark = [pytest.mark.chromium, pytest.mark.asyncio(loop_scope="session")]

OTHER = "other-model"


async def test_one_model_is_no_choice(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        await expect(tab.page.locator("#model")).to_contain_text(FIRST)
        await expect(tab.page.locator("#left-model")).to_be_hidden()
        await tab.send("Hello", max_tokens="64")
        await tab.turns_end(1)
        await expect(tab.page.locator("#session-list")).not_to_contain_text(FIRST)


async def test_a_new_session_takes_the_model_that_was_chosen(browser: Browser) -> None:
    shelf = Shelf(OTHER)
    async with serving(shelf, is_live=True) as server, playground(browser, server.url) as tab:
        await tab.page.select_option("#left-model", OTHER)
        await expect(tab.page.locator("#model")).to_have_text(f"{OTHER} · loaded when it is first used")
        assert not shelf.loaded[OTHER]
        await tab.page.reload()
        await expect(tab.page.locator("#left-model")).to_have_value(OTHER)
        await tab.send("Hello", max_tokens="64")
        await tab.turns_end(1)
        assert await tab.answers() == [f" said by {OTHER}"]
        await expect(tab.page.locator("#model")).to_contain_text("parameters")
        await expect(tab.page.locator("#left-model")).to_be_hidden()
        assert await tab.pane().locator(".composer .choices").evaluate("one => one.getClientRects().length") == 0
        await expect(tab.pane().locator(".pane-head .facts")).to_contain_text(OTHER)
        await expect(tab.page.locator("#session-list")).to_contain_text(OTHER)
        [head] = await heads(server)
        assert head["model"] == OTHER
        await tab.page.click("#new-session")
        await tab.page.select_option("#left-model", FIRST)
        await tab.send("Hello", max_tokens="64")
        await tab.turns_end(1)
        assert await tab.answers() == [" said by the first"]


async def test_a_linked_session_is_read_by_its_own_model(browser: Browser) -> None:
    shelf = Shelf(OTHER)
    async with serving(shelf, is_live=True) as server:
        made = (await server.client.post("/v1/sessions", json={"model": OTHER, "metadata": {"kind": "chat"}})).json()
        turn = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}
        await server.client.post(f"/v1/sessions/{made['id']}/generate", json=turn)
        [backend] = shelf.loaded[OTHER]
        num_before = len(backend.requests)
        async with playground(browser, server.url) as tab:
            await tab.page.locator(".session").click()
            await expect(tab.pane().locator(".answer .token[data-level]").last).to_be_visible()
            await expect(tab.pane().locator(".role")).to_have_text(["You", "Model"])
            await expect(tab.page.locator("#model")).to_contain_text(OTHER)
            assert await tab.answers() == [f"said by {OTHER}"]  # a chat's first blank is the template's
        assert len(backend.requests) > num_before


async def test_a_state_of_another_model_starts_a_session_of_it(browser: Browser) -> None:
    async with serving(Shelf(OTHER), is_live=True) as server, playground(browser, server.url) as tab:
        body = {"name": "greeting", "messages": [{"role": "user", "content": "Hello"}], "model": OTHER}
        assert (await server.client.post("/v1/states", json=body)).status_code == 200
        await tab.page.locator("#states summary").click()
        await expect(tab.page.locator("#states")).to_contain_text(OTHER)
        await tab.page.locator("[data-state='greeting@1']").click()
        await expect(tab.pane().locator(".pane-head .facts")).to_contain_text(OTHER)
        [head] = await heads(server)
        assert head["model"] == OTHER


async def test_a_model_that_cannot_be_loaded_is_named_and_the_text_stays(browser: Browser) -> None:
    shelf = Shelf(OTHER)
    shelf.broken.add(OTHER)
    async with serving(shelf, is_live=True) as server, playground(browser, server.url) as tab:
        await tab.page.select_option("#left-model", OTHER)
        await tab.send("Hello")
        await expect(tab.page.locator("#left-notice")).to_contain_text(OTHER)
        await expect(tab.page.locator("#left-input")).to_have_value("Hello")
        assert await heads(server) == []


async def test_a_session_of_a_model_that_is_gone_is_not_scored_by_another(browser: Browser) -> None:
    backend = FakeBackend()
    async with gateway(backend, is_live=True) as server:
        session_id = (await server.client.post("/v1/sessions")).json()["id"]
        await server.client.post(f"/v1/sessions/{session_id}/generate", json={"input": "Hello", "max_tokens": 64})
        async with (
            gateway(FakeBackend(fingerprint="another"), store=server.store, is_live=True) as later,
            playground(browser, later.url) as tab,
        ):
            await tab.page.locator(".session").click()
            await expect(tab.page.locator("#left-notice")).to_contain_text("is not served here")
            await expect(tab.pane().locator(".answer .token")).to_have_count(1)
            await expect(tab.pane().locator(".answer .token[data-level]")).to_have_count(0)


async def test_a_tuned_state_gives_its_model_name_and_starts_no_session(browser: Browser) -> None:
    backend = FakeBackend()
    async with gateway(backend, is_live=True) as server:
        file = tuned_file(
            state_after((0,)),
            model=backend.model,
            tokenizer_fingerprint=backend.tokenizer.fingerprint,
            tenant="default",
            name="orders",
            state_format=StateFormat.FP32,
        )
        await server.services.states.add("default", "orders", file, source=SOURCE, metadata={})
        permissions = ["clipboard-read", "clipboard-write"]
        async with playground(browser, server.url, permissions=permissions) as tab:
            await tab.page.locator("#states summary").click()
            row = tab.page.locator("[data-state='orders@1']")
            await expect(row).to_contain_text("tuned")
            await row.click()
            name = f"ft:{FIRST}:orders@1"
            await expect(tab.page.locator("#page-notice")).to_contain_text(f"Copied: {name}.")
            assert await tab.page.evaluate("navigator.clipboard.readText()") == name
            answer = await server.client.post("/v1/completions", json={"model": name, "prompt": "x", "max_tokens": 40})
            assert answer.status_code == 200, answer.text
            assert await heads(server) == []
