"""The server's own page in a real browser: send, hear, see, stop, and the library's figure, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import PICTURES, Diary
from tests.pipelines import experiment
from tests.serving import Served, served


@pytest.fixture(scope="module")
def server(voice) -> Iterator[Served]:
    with served(experiment(voice, "executor=inline"), key="a secret") as running:
        yield running


@pytest.fixture
def home(browser: Browser, server: Served) -> Iterator[Page]:
    diary = Diary(server.url)
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    diary.follow(page)
    page.add_init_script(path=Path(__file__).with_name("ear.js"))
    page.goto(server.url)
    page.get_by_label("API key").fill("a secret")
    yield page
    page.close()
    refused = "status of 400"  # which the browser notes, and the page tells
    assert ([error for error in diary.errors if refused not in error], diary.outside) == ([], [])


def figures(page: Page) -> dict[str, str]:
    return {box.locator("dt").inner_text(): box.locator("dd").inner_text() for box in page.locator("dl div").all()}


def test_send_hear_and_see(home: Page, server: Served):
    home.get_by_label("your message").fill("Please read: Good morning.")
    home.get_by_role("button", name="Send").click()
    home.wait_for_function("loudness() > 0.05")
    home.wait_for_selector("#picture svg path.head[d]", state="attached")
    home.wait_for_function("contexts.length === 1 && contexts[0].currentTime > 0.5")
    expect(home.get_by_role("button", name="Send")).to_be_enabled()
    expect(home.get_by_role("button", name="Stop")).to_be_disabled()
    assert home.locator("#answer").inner_text() != ""
    shown = figures(home)
    assert all(float(shown[name].split()[0]) > 0 for name in ("first token", "first audio", "RTF", "end", "speech"))
    assert home.locator("#picture svg path.chunk").count() > 1
    heard = home.evaluate("contexts[0].currentTime")
    assert heard >= float(shown["speech"].split()[0])
    home.screenshot(path=PICTURES / "page_light.png")

    home.get_by_text("The report's figure of this answer").click()
    expect(home.locator("#figure .scatterlayer .trace").first).to_be_visible()
    light = home.locator("#figure .main-svg").first.evaluate("e => getComputedStyle(e).backgroundColor")
    home.emulate_media(color_scheme="dark")
    home.wait_for_function(
        "light => getComputedStyle(document.querySelector('#figure .main-svg')).backgroundColor !== light", arg=light
    )
    home.screenshot(path=PICTURES / "page_dark.png", full_page=True)


def test_stop_frees_the_pipeline_and_is_silent(home: Page, server: Served):
    home.get_by_label("your message").fill("Please read: " + "The quick brown fox jumps over the lazy dog. " * 4)
    home.get_by_role("button", name="Send").click()
    home.wait_for_function("loudness() > 0.05")
    assert len(server.service.pipeline.requests) == 1
    home.get_by_role("button", name="Stop").click()
    home.wait_for_function("loudness() === 0")
    expect(home.get_by_role("button", name="Stop")).to_be_disabled()
    expect(home.get_by_role("button", name="Send")).to_be_enabled()
    server.until(lambda: not server.service.pipeline.requests and server.at_work == 0)


def test_a_mistake_is_told(home: Page):
    home.get_by_label("your message").fill("Please read: Good morning.")
    home.get_by_label("voice").fill("nobody")
    home.get_by_role("button", name="Send").click()
    expect(home.locator("#answer.error")).to_contain_text("unknown speaker 'nobody'")
    expect(home.get_by_role("button", name="Send")).to_be_enabled()
