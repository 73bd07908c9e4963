"""The pictures of docs/playground.md: `python -m tests.support.playground_pictures --url http://127.0.0.1:8000`.

The server has the bundled model, and no sessions yet.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from PIL import Image

from tests.support.browsers import Playground, chromium, playground

NUM_COLOURS = 128  # of a picture's palette: a third of the bytes, and nobody sees it
DESK: dict[str, Any] = {"viewport": {"width": 1280, "height": 860}, "color_scheme": "light"}
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "device_scale_factor": 1.5}
OPENING = "The old captain lit his lamp and looked out over the water. There was no wind, and"


async def draw(url: str, folder: Path) -> None:
    """playground-session.png, playground-branches.png, playground-chat.png, playground-phone.png."""
    async with chromium() as browser:
        async with playground(browser, url, **DESK) as tab:
            await converse(tab)
            await shoot(tab, folder / "playground-session.png")
            await tab.page.emulate_media(color_scheme="dark")
            await branch(tab)
            await shoot(tab, folder / "playground-branches.png")
        async with playground(browser, url, **DESK) as tab:
            await chat(tab)
            await shoot(tab, folder / "playground-chat.png")
        async with playground(browser, url, **PHONE) as tab:
            await tab.send("She opened the letter and read:", max_tokens="60", temperature="0.8", seed="11")
            await tab.turns_end(1)
            await tab.page.evaluate("window.scrollTo(0, 0)")
            await shoot(tab, folder / "playground-phone.png")


async def converse(tab: Playground) -> None:
    await tab.send(OPENING, max_tokens="80", temperature="0.8", seed="3")
    await tab.turns_end(1)
    await tab.send("In the morning they saw the sail again,", max_tokens="60")
    await tab.turns_end(2)
    await tab.pane().locator(".answer").nth(1).focus()
    for _ in range(12):
        await tab.page.keyboard.press("ArrowRight")


async def chat(tab: Playground) -> None:
    """A chat of two messages, with a token of its last answer chosen."""
    await tab.pane().get_by_role("button", name="Chat").click()
    await tab.page.fill("#left-system", "A traveller talks to a sailor in the harbour.")
    more = tab.pane().locator("details.more")
    await more.evaluate("one => one.open = true")
    await tab.page.fill("#left-stop", "Assistant:")
    await more.evaluate("one => one.open = false")
    await tab.send("Where does your captain live?", max_tokens="48", temperature="0.8", seed="8")
    await tab.turns_end(1)
    await tab.send("And who looks after his house?")
    await tab.turns_end(2)
    await tab.pane().locator(".answer").nth(1).focus()
    for _ in range(4):
        await tab.page.keyboard.press("ArrowRight")


async def branch(tab: Playground) -> None:
    """The second turn again, from the end of the first."""
    await tab.pane().locator(".turn-foot").first.get_by_role("button", name="Fork from here").click()
    await tab.turns_end(1, pane="right")
    await tab.send("In the morning the sea was empty,", pane="right", max_tokens="60", temperature="0.8", seed="4")
    await tab.turns_end(2, pane="right")


async def shoot(tab: Playground, path: Path) -> None:
    """When the states are drawn too."""
    await tab.page.locator(".use tbody tr").first.wait_for()
    await tab.page.screenshot(path=path, animations="disabled")
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(NUM_COLOURS).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--into", type=Path, default=Path("docs/images"), help="a folder")
    args = parser.parse_args()
    asyncio.run(draw(args.url, args.into))


if __name__ == "__main__":
    main()
