import shutil

from playwright.sync_api import sync_playwright
from report import URL, attempt


def use():
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        page = browser.new_page()
        page.goto(URL)
        page.fill("#left-max_tokens", "8")
        page.fill("#left-input", "Once upon a time")
        page.get_by_role("button", name="Send").click()
        page.locator(".turn[data-status=done]").wait_for(timeout=60_000)
        text = page.locator(".answer").text_content()
        page.goto(f"{URL}/docs")
        page.locator(".opblock").first.wait_for()
        browser.close()
        return text


attempt("playground and API page", use)
