"""Who may use the page and how: keys, keyboard alone, narrow screens, both themes, and text that is only text."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from playwright.async_api import Browser, expect

from tests.support.browsers import Playground, playground
from tests.support.fakes import DEFAULT_SCRIPT, FakeBackend
from tests.support.gateway import gateway
from tests.support.tenants import make_key, write_keys

pytestmark = [pytest.mark.chromium, pytest.mark.asyncio(loop_scope="session")]

HOSTILE = '<img src=x onerror="window.taken = 1"><script>window.taken = 2</script>{{7*7}}</textarea>'
PHONE = {"width": 360, "height": 740}
DESK = {"width": 1280, "height": 800}


async def test_text_never_becomes_html(browser: Browser) -> None:
    async with gateway(FakeBackend(script=HOSTILE), is_live=True) as server, playground(browser, server.url) as tab:
        await tab.send(HOSTILE, max_tokens="300")
        await tab.turns_end(1)
        await expect(tab.pane().locator(".input")).to_have_text(HOSTILE)
        assert await tab.answers() == [HOSTILE]
        await expect(tab.pane().locator("h2")).to_have_text(HOSTILE[:60])
        await expect(tab.page.locator(".session-title")).to_have_text(HOSTILE[:60])
        await tab.pane().locator(".answer .token").first.click()
        await tab.pane().locator(".pane-head").get_by_role("button", name="Fork").click()
        await tab.turns_end(1, pane="right")
        await tab.page.reload()
        await tab.turns_end(1)
        assert await tab.answers() == [HOSTILE]
        assert await tab.page.locator("img, main script").count() == 0
        assert await tab.page.evaluate("window.taken") is None


async def test_control_characters_are_seen_and_turn_nothing_about(browser: Browser) -> None:
    text = "a\u202ecba\u0007\u2066d\u007f\n\u05d0\u05d1"
    seen = "a⟨U+202E⟩cba␇⟨U+2066⟩d␡\n\u05d0\u05d1"
    async with gateway(FakeBackend(script=text), is_live=True) as server, playground(browser, server.url) as tab:
        await tab.send(text, max_tokens="64")
        await tab.turns_end(1)
        assert await tab.pane().locator(".input").text_content() == seen
        assert await tab.answers() == [seen]
        assert "\u202e" not in await tab.page.content()


async def test_the_browser_itself_refuses_html_from_text(browser: Browser) -> None:
    """So a later script that forgets the rule fails at once."""
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        code = "() => { try { document.body.innerHTML = '<b>x</b>' } catch (error) { return error.name } }"
        assert await tab.page.evaluate(code) == "TypeError"
        tab.faults = [fault for fault in tab.faults if "TrustedHTML" not in fault]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
async def test_axe_finds_nothing(browser: Browser, scheme: Literal["light", "dark"], size: dict[str, int]) -> None:
    options = {"color_scheme": scheme, "viewport": size, "bypass_csp": True}
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url, **options) as tab:
        await tab.send("Hello", temperature="9")
        await expect(tab.page.locator("#left-notice")).to_be_visible()
        assert await tab.violations() == []
        await tab.send("Hello", max_tokens="64", temperature="1")
        await tab.turns_end(1)
        await show_all_levels(tab)
        await tab.pane().locator(".answer").focus()
        await tab.page.keyboard.press("ArrowRight")
        await tab.pane().locator(".pane-head").get_by_role("button", name="Fork").click()
        await tab.turns_end(1, pane="right")
        assert await tab.violations() == []
        await tab.show_tokens("numbers")
        await tab.pane("right").get_by_role("button", name="Delete").click()
        assert await tab.violations() == []


async def show_all_levels(tab: Playground) -> None:
    """The fake's tokens are all equally likely."""
    await tab.page.evaluate(
        "document.querySelectorAll('.answer .token').forEach((one, n) => one.dataset.level = n % 5)"
    )


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
async def test_nothing_is_wider_than_the_screen(browser: Browser, size: dict[str, int]) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url, viewport=size) as tab:
        await tab.send("Hellohellohello" * 20, max_tokens="64")
        await tab.turns_end(1)
        await tab.pane().locator(".pane-head").get_by_role("button", name="Fork").click()
        await tab.turns_end(1, pane="right")
        await tab.show_tokens("numbers")
        assert await tab.page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        if size is PHONE:
            await expect(tab.page.locator("#sessions")).to_be_hidden()
            await tab.page.click("#drawer")
            await tab.page.locator(".session").first.click()
            await expect(tab.page.locator("#sessions")).to_be_hidden()


async def test_a_narrow_screen_shows_one_pane_at_a_time_and_always_its_composer(browser: Browser) -> None:
    backend = FakeBackend(script="A line of the answer.\n" * 40)
    async with gateway(backend, is_live=True) as server, playground(browser, server.url, viewport=PHONE) as tab:
        await tab.send("Hello", max_tokens="900")
        await tab.turns_end(1)
        await tab.page.evaluate("window.scrollTo(0, 300)")
        await expect(tab.page.locator("#left-input")).to_be_in_viewport(ratio=1)
        await expect(tab.pane().get_by_role("button", name="Send")).to_be_in_viewport(ratio=1)

        choice = tab.page.locator("#pane-choice")
        await expect(choice).to_be_hidden()
        await tab.pane().locator(".pane-head").get_by_role("button", name="Fork").click()
        await tab.turns_end(1, pane="right")
        await expect(tab.pane()).to_be_hidden()
        await choice.get_by_role("button", name="Left").click()
        await expect(tab.pane("right")).to_be_hidden()
        await expect(tab.pane()).to_be_visible()
        await expect(choice.get_by_role("button", name="Left")).to_have_attribute("aria-pressed", "true")


async def test_the_keyboard_alone_is_enough(browser: Browser) -> None:
    """Every stop of the Tab key is seen, and a turn, its tokens, a fork and a rewind need nothing else."""
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        keyboard = tab.page.keyboard
        await keyboard.press("Tab")
        await expect(tab.page.locator(".skip")).to_be_focused()
        await keyboard.press("Enter")
        await tab_to(tab, "#left-input")
        await keyboard.type("Hello")
        await tab_to(tab, "#left .send .primary")
        await keyboard.press("Enter")
        await tab.turns_end(1)
        await tab_to(tab, "#left .answer", backwards=True)
        await keyboard.press("End")
        await expect(tab.pane().locator(".place")).to_contain_text("14 of 14")
        await expect(tab.page.locator("#announcer")).to_contain_text("14 of 14")
        await keyboard.press("Home")
        await tab_to(tab, "#left .turn-foot button:nth-child(1)")
        await keyboard.press("Enter")  # fork
        await tab.turns_end(1, pane="right")
        await tab_to(tab, "#left .looking .tools button")
        await keyboard.press("Enter")  # rewind to this token
        await expect(tab.page.locator("#confirm")).to_be_visible()
        await tab_to(tab, "#confirm .yes")
        await keyboard.press("Enter")
        await expect(tab.pane().locator(".turn-foot")).to_contain_text("taken back to here")


async def tab_to(tab: Playground, selector: str, *, backwards: bool = False) -> None:
    """At most so many stops as a page of this kind may have; each must show that it is focused."""
    target = tab.page.locator(selector).first
    for _ in range(40):
        await tab.page.keyboard.press("Shift+Tab" if backwards else "Tab")
        seen = "() => document.activeElement === document.body || "
        seen += "getComputedStyle(document.activeElement).outlineStyle !== 'none'"
        assert await tab.page.evaluate(seen), await tab.page.evaluate("document.activeElement.outerHTML")
        if await target.evaluate("one => one === document.activeElement"):
            return
    raise AssertionError(f"{selector} is not reached")


async def test_keys_are_asked_for_and_stay_in_the_tab(browser: Browser, tmp_path: Path) -> None:
    good, other = make_key("acme"), make_key("acme")
    file = write_keys(tmp_path / "keys.toml", good, acme="")
    async with (
        gateway(FakeBackend(), is_live=True, api_keys_file=file) as server,
        playground(browser, server.url) as tab,
    ):
        dialog = tab.page.locator("#key-dialog")
        await expect(dialog).to_contain_text("This server asks for an API key.")
        await expect(tab.page.locator("#key")).to_be_focused()
        await tab.page.fill("#key", other.text)
        await tab.page.keyboard.press("Enter")
        await expect(dialog).to_contain_text("The server does not know this key.")
        await expect(dialog).not_to_contain_text("Bearer")
        await expect(tab.page.locator("#key")).to_have_value("")
        await tab.page.fill("#key", good.text)
        await tab.page.keyboard.press("Enter")
        await expect(tab.page.locator("#model")).to_contain_text("parameters")
        await tab.send("Hello", max_tokens="64")
        await tab.turns_end(1)

        await tab.page.reload()
        await tab.turns_end(1)
        stored = await tab.page.evaluate("[JSON.stringify(localStorage), document.cookie, location.href]")
        assert good.text not in "".join(stored)
        assert good.text in await tab.page.evaluate("JSON.stringify(sessionStorage)")
        assert good.text not in await tab.page.content()

        await tab.page.click("#forget-key")
        await expect(dialog).to_be_visible()
        assert good.text not in await tab.page.evaluate("JSON.stringify(sessionStorage)")


async def test_who_gives_no_key_is_told_once_and_may_give_it_later(browser: Browser, tmp_path: Path) -> None:
    key = make_key("acme")
    file = write_keys(tmp_path / "keys.toml", key, acme="")
    async with (
        gateway(FakeBackend(), is_live=True, api_keys_file=file) as server,
        playground(browser, server.url) as tab,
    ):
        dialog, notice = tab.page.locator("#key-dialog"), tab.page.locator("#page-notice")
        await expect(dialog).to_be_visible()
        await expect(tab.pane("right")).to_be_hidden()
        await dialog.get_by_role("button", name="Cancel").click()
        await expect(notice).to_contain_text("no API key was given")
        await expect(tab.page.locator("#session-list")).to_contain_text("Enter a key to see the list.")
        await expect(dialog).to_be_hidden()

        await tab.send("Hello", max_tokens="64")
        await expect(dialog).to_be_visible()
        await tab.page.fill("#key", key.text)
        await tab.page.keyboard.press("Enter")
        await tab.turns_end(1)
        await expect(notice).to_be_hidden()
        await expect(tab.page.locator("#model")).to_contain_text("parameters")
        await expect(tab.page.locator(".sessions li")).to_have_count(1)


async def test_the_theme_follows_the_system_until_somebody_chooses(browser: Browser) -> None:
    async with (
        gateway(FakeBackend(), is_live=True) as server,
        playground(browser, server.url, color_scheme="dark") as tab,
    ):
        dark = await background(tab)
        await tab.page.emulate_media(color_scheme="light")
        light = await background(tab)
        assert dark != light
        await tab.page.select_option("#theme", "dark")
        assert await background(tab) == dark
        await tab.page.reload()
        assert await background(tab) == dark
        await tab.page.select_option("#theme", "system")
        assert await background(tab) == light


async def background(tab: Playground) -> str:
    return str(await tab.page.evaluate("getComputedStyle(document.body).backgroundColor"))


async def test_numbers_show_each_probability_as_text(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        await tab.send("Hello", max_tokens="64")
        await tab.turns_end(1)
        assert await tab.answers() == [DEFAULT_SCRIPT]
        token = tab.pane().locator(".answer .token").first
        await expect(token).to_have_attribute("title", "It: 60.7 %")
        shown = "one => getComputedStyle(one, '::after').content"
        assert await token.evaluate(shown) == "none"
        await tab.show_tokens("numbers")
        assert await token.evaluate(shown) == '"61%"'


async def test_lines_break_where_the_text_does(browser: Browser) -> None:
    backend = FakeBackend(script="One.\nTwo.\n\nThree.")
    async with gateway(backend, is_live=True) as server, playground(browser, server.url) as tab:
        await tab.send("Hello", max_tokens="64")
        await tab.turns_end(1)
        first, last = tab.pane().locator(".answer .token").first, tab.pane().locator(".answer .token").last
        for _ in range(2):
            top, bottom = await first.bounding_box(), await last.bounding_box()
            assert top is not None
            assert bottom is not None
            assert bottom["y"] > top["y"] + 2.5 * top["height"]
            await tab.show_tokens("numbers")
