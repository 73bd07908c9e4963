"""What a person does in the playground with conversations, in a real browser on a real server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from nsm_core.config import EngineConfig
from nsm_core.energy.estimate import EstimateMeter
from nsm_core.engine.request import GenerationRequest
from nsm_core.errors import InvalidRequest, Overloaded
from nsm_core.stats import EnergyUse
from nsm_core.tokenizer import Tokenizer
from service.backends.local import LocalBackend
from tests.nsm_lab.evaluation.models import random_model, small_config
from tests.support.browsers import Playground, playground
from tests.support.fakes import DEFAULT_SCRIPT, FakeBackend, FakeGeneration
from tests.support.gateway import Gateway, gateway
from tests.support.models import as_loaded

pytestmark = [pytest.mark.chromium, pytest.mark.asyncio(loop_scope="session")]


def local_backend(tokenizer: Tokenizer) -> LocalBackend:
    """A window and two layers with routed states."""
    model = random_model(small_config(tokenizer, num_layers=3, layer_pattern="WNN")).eval().requires_grad_(False)
    config = EngineConfig(max_slots=2, token_budget=32, queue_limit=2)
    return LocalBackend(as_loaded(model, tokenizer), config, meter=EstimateMeter())


class NoRouting(FakeBackend):
    """Refuses as a backend does whose models run in other processes."""

    def submit(self, request: GenerationRequest) -> FakeGeneration:
        if request.include_routing:
            raise InvalidRequest("include_routing is not supported here", param="include_routing")
        return super().submit(request)


class BusyRouting(FakeBackend):
    """Refuses as a backend does that tells the routing of enough others."""

    def submit(self, request: GenerationRequest) -> FakeGeneration:
        if request.include_routing:
            raise Overloaded("at most 8 requests with include_routing may run at a time")
        return super().submit(request)


async def heads(server: Gateway) -> list[dict[str, object]]:
    return list((await server.client.get("/v1/sessions")).json()["data"])


async def test_a_turn_shows_probabilities_routing_states_energy_and_times(
    browser: Browser, tiny_tokenizer: Tokenizer
) -> None:
    async with (
        gateway(local_backend(tiny_tokenizer), is_live=True) as server,
        playground(browser, server.url, bypass_csp=True) as tab,
    ):
        pane = tab.pane()
        await expect(tab.page.locator("#model")).to_contain_text("parameters")
        await tab.send("It was", max_tokens="12", temperature="0.7", seed="5")
        await tab.turns_end(1)
        facts = pane.locator(".turn-foot .facts")
        for part in ("12 tokens", "first token", "tokens/s", "a token (cpu, estimate)", "resumed 0"):
            await expect(facts).to_contain_text(part)
        assert (
            await pane.locator(".answer .token[data-level]").count() == await pane.locator(".answer .token").count() > 0
        )
        (head,) = await heads(server)
        assert (head["version"], head["metadata"]) == (1, {"title": "It was"})
        await expect(pane.locator(".pane-head")).to_contain_text("J for the turns shown")

        await pane.locator(".answer").focus()
        await tab.page.keyboard.press("End")
        await expect(pane.locator(".chances tr").first).to_contain_text("%")
        await expect(pane.locator(".chosen-row").first).to_contain_text("sampled")
        routes = pane.locator(".routes tbody tr")
        await expect(routes).to_have_count(2)
        await expect(routes.first).to_have_text(re.compile(r"1 slots\d+ \(\d\.\d\d\)"))
        for canvas in await pane.locator("canvas").all():
            assert await canvas.evaluate("one => one.width * one.height") > 100
            assert await is_painted(canvas)
            await expect(canvas).to_have_attribute("aria-label", re.compile("state"))

        await expect(pane.locator(".use tbody tr")).to_have_count(3)
        await expect(pane.locator(".use tbody tr").nth(1)).to_contain_text("of 8")
        await tab.send("And")
        await tab.turns_end(2)
        await expect(pane.locator(".use caption")).to_contain_text("2 readings")
        assert await tab.violations() == []


async def test_joules_are_those_of_the_turns_shown(browser: Browser) -> None:
    backend = FakeBackend(energy=(EnergyUse(source="cpu", method="estimate", joules=0.5),))
    async with gateway(backend, is_live=True) as server, playground(browser, server.url) as tab:
        for number in (1, 2):
            await tab.send("It was", max_tokens="5")
            await tab.turns_end(number)
        head = tab.pane().locator(".pane-head")
        await expect(head).to_contain_text("J for the turns shown")
        backend.hold_on()
        await tab.send("More", max_tokens="5")
        await tab.page.get_by_role("button", name="Stop").click()
        await tab.pane().locator(".turn[data-status=stopped]").wait_for()
        await expect(head).to_contain_text("J for 2 of the 3 turns shown")


async def is_painted(canvas: object) -> bool:
    code = "one => one.getContext('2d').getImageData(0, 0, one.width, one.height).data.some(value => value > 0)"
    return bool(await canvas.evaluate(code))  # type: ignore[attr-defined]


async def test_the_map_over_time_leads_to_its_tokens(browser: Browser, tiny_tokenizer: Tokenizer) -> None:
    async with gateway(local_backend(tiny_tokenizer), is_live=True) as server, playground(browser, server.url) as tab:
        await tab.send("It was", max_tokens="12")
        await tab.turns_end(1)
        pane = tab.pane()
        await pane.get_by_role("combobox", name="Layer").select_option("2")
        await expect(pane.locator("figcaption").nth(1)).to_contain_text("Layer 2 over")
        await pane.get_by_role("combobox", name="Weights").select_option("read")
        await pane.locator("canvas").nth(1).click(position={"x": 2, "y": 4})
        await expect(pane.locator(".answer .token").first).to_have_class(re.compile("selected"))


async def test_what_the_server_does_not_tell_is_said(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        await tab.send("Hello", max_tokens="3")
        await tab.turns_end(1)
        await expect(tab.pane().locator("[aria-label=Routing]")).to_contain_text("does not report the routing")
        await expect(tab.pane().locator(".facts").last).to_contain_text("energy is not measured here")


async def test_a_server_that_refuses_to_tell_the_routing_is_asked_without(browser: Browser) -> None:
    backend = NoRouting()
    async with gateway(backend, is_live=True) as server, playground(browser, server.url) as tab:
        await tab.send("Hello", max_tokens="3")
        await tab.turns_end(1)
        await expect(tab.pane().locator("[aria-label=Routing]")).to_contain_text("does not report the routing")
        await expect(tab.page.locator("#left-routing")).not_to_be_checked()
        assert [request.include_routing for request in backend.requests] == [False]
        await tab.send("And then")
        await tab.turns_end(2)


async def test_a_turn_that_finds_the_routing_taken_goes_without_and_says_so(browser: Browser) -> None:
    backend = BusyRouting()
    async with gateway(backend, is_live=True) as server, playground(browser, server.url) as tab:
        await tab.send("Hello", max_tokens="64")
        await tab.turns_end(1)
        assert await tab.answers() == [DEFAULT_SCRIPT]
        await expect(tab.pane().locator("[aria-label=Routing]")).to_contain_text("a few turns at a time")
        await expect(tab.pane().locator(".turn-foot")).to_contain_text("routing left out")
        await expect(tab.page.locator("#left-notice")).to_be_hidden()
        await expect(tab.page.locator("#left-routing")).to_be_checked()  # the next turn asks again


async def test_routing_may_be_left_out(browser: Browser, tiny_tokenizer: Tokenizer) -> None:
    async with gateway(local_backend(tiny_tokenizer), is_live=True) as server, playground(browser, server.url) as tab:
        await tab.page.uncheck("#left-routing")
        await tab.send("Hello", max_tokens="5")
        await tab.turns_end(1)
        await expect(tab.pane().locator("[aria-label=Routing]")).to_contain_text("Routing was not asked for.")


async def test_a_turn_too_long_for_routing_goes_without_and_says_so(
    browser: Browser, tiny_tokenizer: Tokenizer
) -> None:
    async with gateway(local_backend(tiny_tokenizer), is_live=True) as server, playground(browser, server.url) as tab:
        await tab.send("Hello", max_tokens="1025")
        routing = tab.pane().locator("[aria-label=Routing]")
        await expect(routing).to_contain_text("it was too long")
        await tab.turns_end(1)
        await expect(tab.page.locator("#left-notice")).to_be_hidden()
        await expect(tab.page.locator("#left-routing")).to_be_checked()
        await tab.send("And then", max_tokens="5")
        await expect(routing).not_to_contain_text("left out")


async def test_what_runs_when_another_session_is_opened_is_found_again(browser: Browser) -> None:
    backend = FakeBackend(hold=True)
    async with gateway(backend, is_live=True) as server, playground(browser, server.url) as tab:
        await tab.send("Hello", max_tokens="64")
        backend.release(3)
        await expect(tab.pane().locator(".answer .token")).to_have_count(3)
        await tab.page.get_by_role("button", name="New", exact=True).click()
        await expect(tab.pane().locator(".turn")).to_have_count(0)
        backend.release_all()
        await tab.page.locator(".session").click()
        await tab.turns_end(1)
        assert await tab.answers() == [DEFAULT_SCRIPT]
        assert len(backend.requests) == 1


async def test_fork_beside_and_compare(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        await two_turns(tab)
        await tab.pane().locator(".pane-head").get_by_role("button", name="Fork").click()
        await tab.turns_end(2, pane="right")
        await expect(tab.page.locator("#branches")).to_have_text("The same for 2 turns.")
        await expect(tab.pane("right").locator(".pane-head")).to_contain_text("forked from")
        for part in (".pane-head", ".composer", "[aria-label=Token]", "[aria-label=Routing]"):
            assert await top_left(tab, "left", part) == await top_left(tab, "right", part), part
        await tab.send("Otherwise", pane="right")
        await tab.turns_end(3, pane="right")
        await expect(tab.page.locator("#branches")).to_have_text(
            "The same for 2 turns; then only the right one goes on."
        )
        await tab.send("Thus")
        await tab.turns_end(3)
        await expect(tab.page.locator("#branches")).to_contain_text("they part at the input of turn 3")
        await expect(tab.page.locator(".input.parting")).to_have_text(["Thus", "Otherwise"])
        assert [head["version"] for head in await heads(server)] == [3, 3]


async def top_left(tab: Playground, pane: str, part: str) -> tuple[float, float]:
    """Top and height, in pixels."""
    box = await tab.pane(pane).locator(part).bounding_box()
    assert box is not None
    return box["y"], box["height"]


async def test_where_two_answers_part_is_marked(browser: Browser, tiny_tokenizer: Tokenizer) -> None:
    async with gateway(local_backend(tiny_tokenizer), is_live=True) as server, playground(browser, server.url) as tab:
        await tab.page.click("#compare")
        await tab.send("It was", max_tokens="12", seed="1")
        await tab.send("It was", pane="right", max_tokens="12", seed="2")
        await tab.turns_end(1)
        await tab.turns_end(1, pane="right")
        await expect(tab.page.locator("#branches")).to_contain_text("They part in the answer of turn 1, after")
        partings = tab.page.locator(".answer .parting")
        await expect(partings).to_have_count(2)
        left, right = await partings.all_text_contents()
        assert left != right


async def test_fork_from_an_earlier_turn_leaves_the_session_alone(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        await two_turns(tab)
        await tab.pane().locator(".turn-foot").first.get_by_role("button", name="Fork from here").click()
        await tab.turns_end(1, pane="right")
        assert await tab.answers(pane="right") == [DEFAULT_SCRIPT]
        assert await tab.answers() == [DEFAULT_SCRIPT, DEFAULT_SCRIPT]
        fork, origin = await heads(server)
        assert (origin["version"], fork["version"]) == (2, 1)
        assert int(str(fork["position"])) < int(str(origin["position"]))


async def test_rewind_to_a_turn_and_to_a_token(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        await two_turns(tab)
        (before,) = await heads(server)
        await tab.pane().locator(".turn-foot").first.get_by_role("button", name="Rewind to here").click()
        await tab.agree()
        await expect(tab.pane().locator(".turn")).to_have_count(1)
        (after,) = await heads(server)
        assert (before["version"], after["version"]) == (2, 3)

        await tab.pane().locator(".answer .token").nth(2).click()
        await tab.pane().get_by_role("button", name="Rewind to this token").click()
        await tab.agree()
        await expect(tab.pane().locator(".turn-foot")).to_contain_text("taken back to here")
        for part in ("tokens/s", "resumed"):  # the whole turn's
            await expect(tab.pane().locator(".turn-foot")).not_to_contain_text(part)
        shown = (await tab.answers())[0]
        ids = server.services.backend.tokenizer.encode(DEFAULT_SCRIPT)[:3]
        assert shown == server.services.backend.tokenizer.decode(ids)
        await tab.page.reload()
        await tab.turns_end(1)
        assert await tab.answers() == [shown]
        await tab.send("")  # the last token waits to be read
        await tab.turns_end(2)


async def test_what_was_not_agreed_to_is_not_done(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        await two_turns(tab)
        await tab.pane().get_by_role("button", name="Rewind to here").first.click()
        await tab.page.get_by_role("button", name="Cancel").click()
        await tab.pane().get_by_role("button", name="Delete").click()
        await tab.page.keyboard.press("Escape")
        assert [head["version"] for head in await heads(server)] == [2]


async def test_export_import_delete(browser: Browser, tmp_path: Path) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        await two_turns(tab)
        async with tab.page.expect_download() as downloading:
            await tab.pane().get_by_role("button", name="Export").click()
        download = await downloading.value
        file = tmp_path / download.suggested_filename
        await download.save_as(file)
        (origin,) = await heads(server)
        assert file.name == f"{origin['id']}.nsm-session"

        await tab.page.set_input_files("#import-file", file)
        await expect(tab.page.locator("#confirm")).to_contain_text("under a new id")
        await tab.agree()
        await expect(tab.page.locator(".sessions li")).to_have_count(2)
        await tab.turns_end(2)
        await expect(tab.pane().locator(".input").last).to_have_text("And then")  # from the file's log
        assert await tab.answers() == [DEFAULT_SCRIPT, DEFAULT_SCRIPT]

        await tab.pane().get_by_role("button", name="Delete").click()
        await tab.agree()
        await expect(tab.page.locator(".sessions li")).to_have_count(1)
        assert [head["id"] for head in await heads(server)] == [origin["id"]]


async def test_a_damaged_file_is_refused_in_the_servers_words(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "broken.nsm-session"
    file.write_bytes(b"NSMSESS\0 and no more")
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        await tab.page.set_input_files("#import-file", file)
        await expect(tab.page.locator("#page-notice")).to_contain_text("this is no session file that can be used")
        await expect(tab.page.locator("#page-notice")).to_contain_text("HTTP 400 · invalid_session_file")


async def test_a_session_of_elsewhere_is_read_from_its_log(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server:
        await server.client.post("/v1/sessions", json={"id": "other"})
        turn = {"input": "Who is there?", "max_tokens": 5}
        assert (await server.client.post("/v1/sessions/other/generate", json=turn)).status_code == 200
        async with playground(browser, server.url) as tab:
            await tab.page.locator(".session").click()
            await tab.turns_end(1)
            await expect(tab.pane().locator(".input")).to_have_text("Who is there?")
            await expect(tab.pane().locator(".answer .token[data-percent]")).to_have_count(5)
            await tab.pane().locator(".answer .token").last.click()
            await expect(tab.pane().locator("[aria-label=Token]")).to_contain_text("sampled")
            await expect(tab.pane().locator("[aria-label=Routing]")).to_contain_text("did not see it")


async def test_the_address_names_what_is_open(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        await tab.send("First", max_tokens="64")
        await tab.turns_end(1)
        (first,) = await heads(server)
        await expect(tab.page).to_have_url(re.compile(f"#s={first['id']}$"))
        await tab.page.get_by_role("button", name="New", exact=True).click()
        await expect(tab.page).to_have_url(re.compile("/$"))
        await tab.send("Second")
        await tab.turns_end(1)
        await tab.page.locator(".session", has_text="First").click()
        await expect(tab.pane().locator(".input")).to_have_text("First")
        await tab.page.go_back()
        await expect(tab.pane().locator(".input")).to_have_text("Second")
        await tab.page.go_back()
        await expect(tab.pane().locator("h2")).to_have_text("New session")
        await tab.page.go_forward()
        await expect(tab.pane().locator(".input")).to_have_text("Second")
        await tab.pane().locator(".pane-head").get_by_role("button", name="Fork").click()
        await tab.turns_end(1, pane="right")
        await expect(tab.page).to_have_url(re.compile("&beside="))
        link = tab.page.url
        async with playground(browser, link) as other:
            await other.turns_end(1, pane="right")
            await expect(other.page.locator(".input")).to_have_text(["Second", "Second"])
            other.hosts = set()  # its address here has a fragment
        await tab.page.go_back()
        await expect(tab.pane().locator(".input")).to_have_text("Second")
        await expect(tab.pane("right").locator(".turn")).to_have_count(0)


async def test_an_error_names_its_field(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        await tab.send("Hello", temperature="3")
        notice = tab.page.locator("#left-notice")
        await expect(notice).to_contain_text("temperature must be in [0, 2], got 3")
        await expect(notice.locator(".param")).to_have_text("temperature")
        await expect(tab.page.locator("#left-temperature")).to_have_attribute("aria-invalid", "true")
        await expect(tab.page.locator("#left-temperature")).to_be_focused()
        await expect(tab.page.locator("#left-input")).to_have_value("Hello")
        await expect(tab.pane().locator(".turn")).to_have_count(0)
        await tab.page.fill("#left-temperature", "much")
        await tab.page.press("#left-temperature", "Control+Enter")
        await expect(notice).to_contain_text("temperature must be")
        await tab.send("Hello", temperature="0")
        await tab.turns_end(1)
        await expect(notice).to_be_hidden()


async def test_a_turn_of_somebody_else_meanwhile_is_shown_not_overwritten(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        await tab.send("Mine")
        await tab.turns_end(1)
        (head,) = await heads(server)
        await server.client.post(f"/v1/sessions/{head['id']}/generate", json={"input": "Theirs", "max_tokens": 3})
        await tab.send("Mine again")
        await expect(tab.page.locator("#left-notice")).to_contain_text("version_conflict")
        await expect(tab.pane().locator(".input").last).to_have_text("Theirs")
        await expect(tab.page.locator("#left-input")).to_have_value("Mine again")
        await expect(
            tab.pane().locator(".answer .token[data-level]").first
        ).to_be_visible()  # what was known stays known


async def two_turns(tab: Playground) -> None:
    await tab.send("Hello", max_tokens="64")
    await tab.turns_end(1)
    await tab.send("And then")
    await tab.turns_end(2)


@pytest.mark.parametrize("name", ["nope/../x", "..", "a b"])
async def test_address_with_a_text_that_is_no_id_asks_nothing_of_the_server(browser: Browser, name: str) -> None:
    """The browser itself would make another path of some of them."""
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        asked: list[str] = []
        tab.page.on("request", lambda request: asked.append(request.url))
        await tab.page.evaluate("name => { location.hash = `s=${name}`; }", name)
        await expect(tab.pane().locator(".notice")).to_contain_text(f"the session '{name}' does not exist")
        await expect(tab.page).to_have_url(re.compile("/$"))
        assert not [url for url in asked if "/v1/sessions/" in url or url.endswith("/v1/")]


async def test_a_state_is_kept_started_from_and_deleted(browser: Browser) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, playground(browser, server.url) as tab:
        await tab.send("It was", max_tokens="4")
        await tab.turns_end(1)
        page = tab.page
        await page.locator(".row-more").first.click()
        await page.get_by_role("button", name="Keep state").click()
        await page.locator("#name").fill("rules")
        await page.locator("#name-form button[type=submit]").click()
        state = page.locator('#states [data-state="rules@1"]')
        await expect(state).to_contain_text("tokens")
        await state.click()
        await expect(page.locator(".session-title").first).to_have_text("rules@1")
        newest = (await heads(server))[0]
        assert newest["metadata"] == {"title": "rules@1"}
        await page.get_by_role("button", name="Delete the state rules@1").click()
        await page.locator("#confirm .yes").click()
        await expect(state).to_have_count(0)
        assert (await server.client.get("/v1/states")).json()["data"] == []
