"""Streams that are stopped, cut, and read on after a reload, in a real browser."""

from __future__ import annotations

import contextlib
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, expect

from nsm_core.errors import NumericalError
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.browsers import Playground, playground
from tests.support.cutting_proxy import CuttingProxy
from tests.support.fakes import DEFAULT_SCRIPT, FakeBackend
from tests.support.gateway import Gateway, gateway

pytestmark = [pytest.mark.chromium, pytest.mark.asyncio(loop_scope="session")]


async def tokens_are(tab: Playground, count: int) -> None:
    await expect(tab.pane().locator(".answer .token")).to_have_count(count)


def proxy_to(server: Gateway) -> CuttingProxy:
    return CuttingProxy(urlsplit(server.url).port or 0)


async def test_tokens_show_as_they_come_and_escape_stops_the_turn(browser: Browser) -> None:
    backend = FakeBackend(hold=True)
    async with gateway(backend, is_live=True) as server, playground(browser, server.url) as tab:
        await tab.send("Hello", max_tokens="64")
        backend.release(3)
        await tokens_are(tab, 3)
        await expect(tab.pane().get_by_role("button", name="Stop")).to_be_visible()
        await expect(tab.pane().get_by_role("button", name="Fork")).to_be_hidden()
        await tab.page.press("#left-input", "Escape")
        await expect(tab.pane().locator(".turn-foot")).to_contain_text("nothing of this turn is kept")
        await expect(tab.page.locator("#left-input")).to_have_value("Hello")
        (head,) = (await server.client.get("/v1/sessions")).json()["data"]
        assert head["version"] == 0
        backend.release_all()
        await tab.page.press("#left-input", "Control+Enter")
        await tab.turns_end(1)
        assert await tab.answers() == [DEFAULT_SCRIPT]  # the stopped one has gone


async def test_a_reload_reads_on_where_the_stream_was(browser: Browser) -> None:
    backend = FakeBackend(hold=True)
    async with gateway(backend, is_live=True) as server, playground(browser, server.url) as tab:
        await tab.send("Hello", max_tokens="64")
        backend.release(3)
        await tokens_are(tab, 3)
        backend.release(2)  # some of it while nobody reads
        await tab.page.uncheck("#left-routing")
        await tab.page.reload()
        await tokens_are(tab, 5)
        await expect(tab.page.locator("#left-max_tokens")).to_have_value("64")
        await expect(tab.page.locator("#left-routing")).not_to_be_checked()
        backend.release_all()
        await tab.turns_end(1)
        assert await tab.answers() == [DEFAULT_SCRIPT]
        assert await tab.pane().locator(".answer .token[data-level]").count() == len(backend.script_ids) - 1
        await expect(tab.pane().locator(".turn-foot")).to_contain_text("read on after an interruption")
        assert len(backend.requests) == 1
        assert server.metric("nsm_stream_resume_total") >= 1


async def test_a_reload_before_the_first_token_joins_the_turn(browser: Browser) -> None:
    backend = FakeBackend(hold=True)
    async with gateway(backend, is_live=True) as server, playground(browser, server.url) as tab:
        await tab.send("Hello", max_tokens="64")
        await backend.held.wait()
        await tab.page.reload()
        await expect(tab.pane().locator(".turn[data-status=running]")).to_have_count(1)
        backend.release_all()
        await tab.turns_end(1)
        assert await tab.answers() == [DEFAULT_SCRIPT]
        assert len(backend.requests) == 1


async def test_a_cut_connection_is_read_on(browser: Browser) -> None:
    backend = FakeBackend(hold=True)
    async with (
        gateway(backend, is_live=True) as server,
        proxy_to(server) as proxy,
        playground(browser, proxy.url) as tab,
    ):
        await tab.send("Hello", max_tokens="64")
        backend.release(3)
        await tokens_are(tab, 3)
        proxy.is_away = True
        proxy.cut()
        await expect(tab.page.locator("#left-notice")).to_contain_text("The connection was lost")
        backend.release(2)
        proxy.is_away = False
        await tokens_are(tab, 5)
        await expect(tab.page.locator("#left-notice")).to_be_hidden()
        proxy.cut()
        backend.release_all()
        await tab.turns_end(1)
        assert await tab.answers() == [DEFAULT_SCRIPT]
        assert len(backend.requests) == 1


async def test_another_replica_goes_on_with_a_turn_whose_server_stops(browser: Browser, tmp_path: Path) -> None:
    stopping, other = FakeBackend(hold=True), FakeBackend()
    stores = [SqliteSessionStore(tmp_path / "sessions.db") for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        first_life = await stack.enter_async_context(contextlib.AsyncExitStack())
        first = await first_life.enter_async_context(gateway(stopping, is_live=True, store=stores[0], lease_s=1.0))
        second = await stack.enter_async_context(gateway(other, is_live=True, store=stores[1], lease_s=1.0))
        proxy = await stack.enter_async_context(proxy_to(first))
        tab = await stack.enter_async_context(playground(browser, proxy.url))
        await tab.send("Hello", max_tokens="64")
        stopping.release(3)
        await tokens_are(tab, 3)
        proxy.lead_to(urlsplit(second.url).port or 0)
        await first.services.turns.drain(0.0)  # as on SIGTERM, when the grace time is over
        proxy.cut()  # those that the browser kept for later too, as a server closes them
        await tab.turns_end(1)
        await first_life.aclose()
        assert await tab.answers() == [DEFAULT_SCRIPT]
        assert second.metric("nsm_turn_takeover_total") == 1


async def test_a_turn_that_fails_says_why_and_gives_the_text_back(browser: Browser) -> None:
    backend = FakeBackend(fail_after=2, error=NumericalError("the logits of token 3 are not finite"))
    async with gateway(backend, is_live=True) as server, playground(browser, server.url) as tab:
        await tab.send("Hello", max_tokens="64")
        await expect(tab.page.locator("#left-notice")).to_contain_text("the logits of token 3 are not finite")
        await expect(tab.pane().locator(".turn-foot")).to_contain_text("nothing of this turn is kept")
        await expect(tab.page.locator("#left-input")).to_have_value("Hello")
        await tab.pane().get_by_role("button", name="Remove").click()
        await expect(tab.pane().locator(".turn")).to_have_count(0)


async def test_a_session_that_has_gone_is_let_go(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        await tab.send("Hello", max_tokens="3")
        await tab.turns_end(1)
        (head,) = (await server.client.get("/v1/sessions")).json()["data"]
        await server.client.delete(f"/v1/sessions/{head['id']}")
        await tab.page.reload()
        await expect(tab.page.locator("#left-notice")).to_contain_text("session_not_found")
        await expect(tab.pane().locator("h2")).to_have_text("New session")
        assert head["id"] not in tab.page.url


async def test_two_panes_stream_at_once(browser: Browser) -> None:
    backend = FakeBackend(hold=True)
    async with gateway(backend, is_live=True) as server, playground(browser, server.url) as tab:
        await tab.page.click("#compare")
        await tab.send("Left", max_tokens="64")
        await tab.send("Right", pane="right", max_tokens="64")
        await expect(tab.page.locator(".turn[data-status=running]")).to_have_count(2)
        backend.release_all()
        await tab.turns_end(1)
        await tab.turns_end(1, pane="right")
        assert await tab.answers() + await tab.answers(pane="right") == [DEFAULT_SCRIPT, DEFAULT_SCRIPT]
        await tab.page.reload()
        await tab.turns_end(1, pane="right")
        await expect(tab.page.locator("#branches")).to_contain_text("They part at the input of turn 1")
