"""What the playground offers to work with turns and sessions: copies, other answers, names, presets."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Browser, expect

from service.stores.sessions.key import SessionKey
from tests.service.playground.test_sessions_in_browser import heads, two_turns
from tests.support.browsers import Playground, playground
from tests.support.fakes import DEFAULT_SCRIPT, FakeBackend
from tests.support.gateway import gateway

pytestmark = [pytest.mark.chromium, pytest.mark.asyncio(loop_scope="session")]


async def clipboard(tab: Playground, opening: str) -> str:
    """When a text with this opening is there: nothing on the page tells that a copy has replaced the one before."""
    await tab.page.wait_for_function(
        "async (opening) => (await navigator.clipboard.readText()).startsWith(opening)", arg=opening
    )
    return str(await tab.page.evaluate("navigator.clipboard.readText()"))


async def test_send_without_a_text_asks_for_one_and_makes_no_session(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        await tab.pane().get_by_role("button", name="Send").click()
        await expect(tab.page.locator("#left-notice")).to_contain_text("Write something")
        await expect(tab.page.locator("#left-input")).to_be_focused()
        assert await heads(server) == []


async def test_a_refused_first_turn_leaves_no_session(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        async with tab.page.expect_response(lambda answer: answer.request.method == "DELETE"):
            await tab.send("Hello", temperature="3")
        await expect(tab.page.locator("#left-notice")).to_contain_text("temperature must be in [0, 2]")
        await expect(tab.page.locator("#session-list")).to_contain_text("No sessions yet.")
        await expect(tab.pane().locator("h2")).to_have_text("New session")
        assert await heads(server) == []


async def test_an_example_fills_the_field(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        example = tab.pane().locator(".example").first
        text = await example.text_content()
        await example.click()
        await expect(tab.page.locator("#left-input")).to_have_value(str(text))
        await expect(tab.pane().locator(".words")).to_contain_text("The first one stays as it is.")


async def test_enter_sends_where_it_is_switched_on(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        await tab.page.fill("#left-input", "Hello")
        await tab.page.press("#left-input", "Enter")
        await expect(tab.page.locator("#left-input")).to_have_value("Hello\n")
        await tab.page.check("#left-enter-sends")
        await tab.page.press("#left-input", "Shift+Enter")
        await expect(tab.page.locator("#left-input")).to_have_value("Hello\n\n")
        await tab.page.press("#left-input", "Enter")
        await tab.turns_end(1)
        await expect(tab.pane().locator(".input")).to_have_text(re.compile("Hello"))


async def test_presets_fill_the_fields_and_all_fields_are_sent(browser: Browser) -> None:
    backend = FakeBackend()
    async with gateway(backend, is_live=True) as server, playground(browser, server.url) as tab:
        await tab.page.select_option("#left-preset", "Careful")
        await expect(tab.page.locator("#left-temperature")).to_have_value("0.6")
        await tab.pane().locator(".more summary").click()
        await tab.send("Hello", top_k="20", presence_penalty="0.5", stop="END", seed="7")
        await tab.turns_end(1)
        sampling = backend.requests[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.9, 20)
        assert sampling.repetition_penalty == 1.1
        assert (sampling.presence_penalty, sampling.stop, sampling.seed) == (0.5, ("END",), 7)
        await expect(tab.page.locator("#left-preset")).to_have_value("")
        await expect(tab.pane().locator(".turn-foot .facts")).to_contain_text("seed 7")


async def test_the_seed_that_was_drawn_is_shown_and_stays_the_sessions(browser: Browser) -> None:
    backend = FakeBackend()
    async with gateway(backend, is_live=True) as server, playground(browser, server.url) as tab:
        await two_turns(tab)
        (seed,) = {request.sampling.seed for request in backend.requests}
        facts = tab.pane().locator(".turn-foot .facts")
        for index in (0, 1):
            await expect(facts.nth(index)).to_contain_text(f"seed {seed}")
        async with playground(browser, server.url) as other:
            await other.page.locator(".session").click()
            await expect(other.pane().locator(".turn-foot .facts").first).to_contain_text(f"seed {seed}")


async def test_a_turn_is_copied_as_text_and_as_calls_that_give_it_again(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        await tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await tab.send('It\'s "late"', max_tokens="64")
        await tab.turns_end(1)
        menu = tab.pane().get_by_role("combobox", name="Copy of this turn")
        await menu.select_option("text")
        await expect(tab.page.locator("#announcer")).to_have_text("Copied")
        assert await clipboard(tab, DEFAULT_SCRIPT) == DEFAULT_SCRIPT

        await menu.select_option("curl")
        await expect(menu).to_have_value("")
        words = shlex.split(await clipboard(tab, "curl "))
        url, body = words[2], json.loads(words[words.index("-d") + 1])
        assert body["input"] == 'It\'s "late"'
        async with httpx.AsyncClient(timeout=60.0) as client:
            answer = (await client.post(url, json=body)).raise_for_status().json()
        assert answer["choices"][0]["text"] == DEFAULT_SCRIPT

        await menu.select_option("python")
        code = await clipboard(tab, "import ")
        compile(code, "copied", "exec")
        assert url in code


async def test_a_turn_may_be_edited(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        await two_turns(tab)
        await tab.pane().locator(".turn-foot").last.get_by_role("button", name="Edit").click()
        await tab.agree()
        await expect(tab.pane().locator(".turn")).to_have_count(1)
        await expect(tab.page.locator("#left-input")).to_have_value("And then")
        await tab.send("And otherwise")
        await tab.turns_end(2)
        await expect(tab.pane().locator(".input")).to_have_text(["Hello", "And otherwise"])
        await tab.pane().locator(".turn-foot").first.get_by_role("button", name="Edit").click()
        await tab.agree()
        await expect(tab.pane().locator(".turn")).to_have_count(0)
        (head,) = await heads(server)
        assert head["position"] == 0


async def test_another_answer_has_another_seed_and_the_same_place(browser: Browser) -> None:
    backend = FakeBackend()
    async with gateway(backend, is_live=True) as server, playground(browser, server.url) as tab:
        await two_turns(tab)
        await tab.pane().locator(".turn-foot").last.get_by_role("button", name="Again").click()
        await expect(tab.pane().locator(".pane-head")).to_contain_text("version 4")  # two turns, a rewind, a turn
        await tab.turns_end(2)
        await expect(tab.pane().locator(".input")).to_have_text(["Hello", "And then"])
        seeds = [request.sampling.seed for request in backend.requests if request.sampling.max_tokens > 1]
        assert seeds[-1] not in seeds[:-1]


@pytest.mark.parametrize("template", ["rwkv-v1", "rwkv-think-v1"])
async def test_another_answer_after_a_thought_that_was_forgotten(browser: Browser, template: str) -> None:
    """The second turn has read the first answer again without its thought: no version ends with it any more."""
    opening = " <think" if template == "rwkv-think-v1" else ""
    backend = FakeBackend(" <think>Hm, who?</think>\nEmma.".removeprefix(opening))
    async with gateway(backend, is_live=True, chat_template=template) as server, playground(browser, server.url) as tab:
        await tab.pane().get_by_role("button", name="Chat").click()
        for number, text in enumerate(("Who?", "Sure?"), start=1):
            await tab.send(text, max_tokens="100")
            await tab.turns_end(number)
        (head,) = await heads(server)
        asked = (await server.client.get(f"/v1/sessions/{head['id']}")).json()
        await tab.pane().locator(".turn-foot").last.get_by_role("button", name="Again").click()
        await expect(tab.pane().locator(".pane-head")).to_contain_text("version 7")  # 2 and 2, a rewind, and 2
        await tab.turns_end(2)
        prompt = "User: Who?\n\nAssistant: Emma.\n\nUser: Sure?\n\nAssistant:" + opening
        ids = await server.services.store.read_log(SessionKey("default", head["id"]))
        assert server.services.backend.tokenizer.decode(ids[1:]).startswith(prompt)
        assert asked["position"] == (await server.client.get(f"/v1/sessions/{head['id']}")).json()["position"]
        await expect(tab.page.locator("#left-notice")).to_be_hidden()


async def test_sessions_are_renamed_searched_and_deleted_in_the_list(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        for index in range(35):  # more than a page of the list
            title = "needle" if index == 0 else f"hay {index}"
            await server.client.post("/v1/sessions", json={"id": f"s{index}", "metadata": {"title": title, "of": "me"}})
        await tab.page.reload()
        rows = tab.page.locator(".sessions li")
        await expect(rows).to_have_count(30)
        await tab.page.fill("#search", "Needle")
        await expect(rows).to_have_count(1)
        await rows.locator(".row-more").click()
        await rows.get_by_role("button", name="Rename").click()
        await expect(tab.page.locator("#name")).to_have_value("needle")
        await tab.page.fill("#name", "pin")
        await tab.page.keyboard.press("Enter")
        await tab.page.fill("#search", "pin")
        await expect(rows.locator(".session-title")).to_have_text(["pin"])
        head = (await server.client.get("/v1/sessions/s0")).json()
        assert head["metadata"] == {"title": "pin", "of": "me"}
        await rows.locator(".row-more").click()
        await rows.get_by_role("button", name="Delete").click()
        await tab.agree()
        await expect(tab.page.locator("#session-list")).to_contain_text("No session has this name.")
        assert (await server.client.get("/v1/sessions/s0")).status_code == 404


async def test_the_tab_has_its_sessions_title(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        await expect(tab.page).to_have_title("nsm playground")
        await tab.send("A title of its own")
        await tab.turns_end(1)
        await expect(tab.page).to_have_title("A title of its own · nsm")
        await tab.pane().get_by_role("button", name="Rename").click()
        await tab.page.fill("#name", "Another")
        await tab.page.keyboard.press("Enter")
        await expect(tab.page).to_have_title("Another · nsm")
        await expect(tab.pane().locator("h2")).to_have_text("Another")


async def test_a_conversation_is_saved_as_markdown(browser: Browser, tmp_path: Path) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        await two_turns(tab)
        async with tab.page.expect_download() as downloading:
            await tab.pane().get_by_role("button", name="Markdown").click()
        await (await downloading.value).save_as(tmp_path / "text.md")
        text = DEFAULT_SCRIPT.strip()
        assert (tmp_path / "text.md").read_text() == f"# Hello\n\n> Hello\n\n{text}\n\n> And then\n\n{text}\n"


async def test_a_fork_begins_with_its_origins_settings(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        await tab.send("Hello", temperature="0.3", max_tokens="64")
        await tab.turns_end(1)
        await tab.pane().locator(".pane-head").get_by_role("button", name="Fork").click()
        await tab.turns_end(1, pane="right")
        await expect(tab.page.locator("#right-temperature")).to_have_value("0.3")


async def test_a_fork_of_an_earlier_turn_names_its_place(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        await two_turns(tab)
        await tab.pane().locator(".turn-foot").first.get_by_role("button", name="Fork from here").click()
        await tab.turns_end(1, pane="right")
        fork, origin = await heads(server)
        assert fork["forked_from"] == f"{origin['id']}@{fork['position']}"
        await expect(tab.pane("right").locator(".pane-head")).to_contain_text(f"at token {fork['position']}")


async def test_the_look_of_tokens_is_kept_over_a_reload(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        await tab.show_tokens("plain")
        await tab.page.reload()
        await expect(tab.page.locator("#look")).to_have_value("plain")
        await expect(tab.page.locator("#panes")).to_have_attribute("data-look", "plain")


async def test_a_chat_has_roles_here_and_in_another_tab(browser: Browser) -> None:
    backend = FakeBackend()
    async with gateway(backend, is_live=True) as server, playground(browser, server.url) as tab:
        await tab.pane().get_by_role("button", name="Chat").click()
        await tab.page.fill("#left-system", "Be brief.")
        await tab.send("Hello", max_tokens="64")
        await tab.turns_end(1)
        await expect(tab.page.locator("#left-system")).to_be_hidden()
        await tab.send("And then?", max_tokens="64")
        await tab.turns_end(2)
        first, second = (backend.tokenizer.decode(request.prompt_ids) for request in backend.requests)
        assert first == "Be brief.\n\nUser: Hello\n\nAssistant:"
        assert second.endswith("\n\nUser: And then?\n\nAssistant:")
        async with playground(browser, server.url) as other:
            await other.page.locator(".session").click()
            for page in (tab, other):
                roles = page.pane().locator(".role")
                await expect(roles).to_have_text(["System", "You", "Model", "You", "Model"])
                await expect(page.pane().locator(".message .input").last).to_have_text("And then?")
            await other.pane().locator(".turn-foot").last.get_by_role("button", name="Again").click()
            await other.page.locator(".turn[data-status=done]").nth(1).wait_for()
            await expect(other.pane().locator(".message .input").last).to_have_text("And then?")


async def test_a_link_shows_probabilities_and_a_token_to_fork_from(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        await tab.send("Hello", max_tokens="64")
        await tab.turns_end(1)
        seen = await tab.answers()
        async with playground(browser, server.url) as other:
            await other.page.goto(tab.page.url)
            await other.page.reload()
            await expect(other.pane().locator(".answer .token[data-level]")).to_have_count(14)
            assert await other.answers() == seen
            await other.pane().locator(".answer .token").nth(2).click()
            await expect(other.pane().locator(".chances")).to_contain_text("sampled")
            await other.pane().get_by_role("button", name="Fork from this token").click()
            await expect(other.pane("right").locator(".facts").first).to_contain_text("forked from")


async def test_a_reload_before_the_log_was_scored_scores_it(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        session_id = (await server.client.post("/v1/sessions")).json()["id"]
        turn = {"input": "Hello", "max_tokens": 64}
        await server.client.post(f"/v1/sessions/{session_id}/generate", json=turn)
        await tab.page.route("**/v1/completions", lambda route: None)  # never answered
        await tab.page.goto(f"{server.url}/#s={session_id}")
        await tab.page.reload()
        await expect(tab.page.locator("#left-notice")).to_contain_text("Reading the text again")
        await tab.page.unroute("**/v1/completions")
        await tab.page.reload()
        await expect(tab.pane().locator(".answer .token[data-level]")).to_have_count(14)


async def test_a_rows_tools_stand_below_its_title(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        await tab.send("A rather long title that needs its room", max_tokens="64")
        await tab.turns_end(1)
        more = tab.page.locator(".row-more")
        await more.click()
        await expect(more).to_have_attribute("aria-expanded", "true")
        tools = tab.page.locator(".row-tools")
        for name in ("Open beside", "Rename", "Delete"):
            await expect(tools.get_by_role("button", name=name)).to_be_visible()
        await more.click()
        await expect(tools).to_be_hidden()
