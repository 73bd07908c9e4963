"""Debian's chromium, driven by playwright: pages of the playground, and what must not happen on any of them."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import AsyncIterator
from typing import Any

from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Locator, Page, Request, async_playwright, expect

TIMEOUT_MS = 120_000.0
ARGS = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")  # as root, and in a container


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A browser without a window."""
    program = shutil.which("chromium")
    if program is None:
        raise RuntimeError("there is no chromium; Debian has it in the package chromium")
    expect.set_options(timeout=TIMEOUT_MS)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=ARGS)
        try:
            yield browser
        finally:
            await browser.close()


@dataclasses.dataclass(slots=True)
class Playground:
    """One tab. `faults`: what the page complained of, `hosts`: who was asked for anything."""

    page: Page
    faults: list[str]
    hosts: set[str]

    def pane(self, name: str = "left") -> Locator:
        return self.page.locator(f"#{name}")

    async def send(self, text: str, *, pane: str = "left", **fields: str) -> None:
        """Writes `text`, and `fields` into those of the sampling, and sends it with the keyboard."""
        if fields:
            await self.page.locator(f"#{pane} details.settings").evaluate("one => one.open = true")
        for name, value in fields.items():
            await self.page.fill(f"#{pane}-{name}", value)
        await self.page.fill(f"#{pane}-input", text)
        await self.page.press(f"#{pane}-input", "Control+Enter")

    async def turns_end(self, count: int, *, pane: str = "left") -> None:
        """Waits until so many turns are done, and the page has nothing under way in the pane."""
        await self.pane(pane).locator(".turn[data-status=done]").nth(count - 1).wait_for()
        await self.page.locator(f"#{pane}:not([data-busy])").wait_for()

    async def answers(self, *, pane: str = "left") -> list[str]:
        return await self.pane(pane).locator(".answer").evaluate_all("all => all.map(one => one.textContent)")

    async def violations(self) -> list[str]:
        """What axe finds against accessibility, each in a line with the element at fault. It makes elements from HTML,
        so the tab needs `bypass_csp`.
        """
        found = (await Axe().run(self.page)).response["violations"]
        return [f"{one['id']}: {node['target']} {node['failureSummary']}" for one in found for node in one["nodes"]]

    async def show_tokens(self, style: str) -> None:
        """As plain text, tinted, or with numbers; a narrow screen has the choice behind a button."""
        if not await self.page.locator("#look").is_visible():
            await self.page.click("#view")
        await self.page.select_option("#look", style)

    async def agree(self) -> None:
        """Says yes to what the page asks."""
        await self.page.locator("#confirm .yes").click()


@contextlib.asynccontextmanager
async def playground(browser: Browser, url: str, **options: Any) -> AsyncIterator[Playground]:
    """A fresh tab at `url`. `options`: of playwright's `new_context`. At the end nothing may have gone wrong in it."""
    context = await browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    context.set_default_timeout(TIMEOUT_MS)
    page = await context.new_page()
    tab = Playground(page, [], set())
    page.on("pageerror", lambda error: tab.faults.append(str(error)))
    page.on("console", lambda message: _note(tab, message.type, message.text))
    page.on("request", lambda request: _note_host(tab, request))
    try:
        await page.goto(url)
        yield tab
        assert tab.faults == []
        assert tab.hosts <= {url.removeprefix("http://").rstrip("/")}
    finally:
        await context.close()


def _note(tab: Playground, kind: str, text: str) -> None:
    # refusals of the server are the tests' own, and the browser reports each
    if kind in ("error", "warning") and "Failed to load resource" not in text:
        tab.faults.append(text)


def _note_host(tab: Playground, request: Request) -> None:
    scheme, _, rest = request.url.partition("://")
    if scheme in ("http", "https"):
        tab.hosts.add(rest.partition("/")[0])
