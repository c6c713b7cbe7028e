"""The live player in JupyterLab: hear it while it generates, see it in two views, stop it, reload the page."""

from __future__ import annotations

import json
from pathlib import Path

from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import PICTURES, ROOT, Diary

NEW = """async () => {
  const panel = await jupyterapp.commands.execute("notebook:create-new", { kernelName: "python3" });
  await panel.sessionContext.ready;
}"""

RUN = """async (code) => {
  const notebook = jupyterapp.shell.currentWidget.content;
  notebook.activeCellIndex = notebook.widgets.length - 1;
  notebook.activeCell.model.sharedModel.setSource(code);
  await jupyterapp.commands.execute("notebook:run-cell-and-insert-below");
}"""


def views(page: Page) -> Locator:
    return page.get_by_role("region", name="Live player")


def say(view: Locator, text: str) -> None:
    view.get_by_label("Text to say").fill(text)
    view.get_by_role("button", name="Speak").click()


def test_it_speaks_stops_and_survives_a_reload(page: Page, diary: Diary):
    page.add_init_script(path=Path(__file__).with_name("ear.js"))
    page.goto("lab?reset")
    page.wait_for_function("window.jupyterapp?.restored.then(() => true)")
    page.evaluate(NEW)
    experiment = json.dumps(str(ROOT / "experiments" / "full.yaml"))
    page.evaluate(RUN, f"from omni_lab.workbench import LivePlayer\nlive = LivePlayer({experiment})\nlive")
    view = views(page).first
    expect(view.get_by_role("status")).to_have_text("ready")

    view.get_by_label("Text to say").fill("The morning train leaves at seven.")
    view.get_by_label("Text to say").press("Enter")
    page.wait_for_function("loudness() > 0.05")
    page.wait_for_selector(".omni-live svg path.head[d]", state="attached")
    expect(view.get_by_role("button", name="Stop")).to_be_disabled()
    expect(view.locator(".answer")).to_have_text("The morning train leaves at seven.")
    assert view.locator("path.chunk").count() > 1
    spoken = float(view.locator("dl div").filter(has_text="speech").locator("dd").inner_text().split()[0])
    assert page.evaluate("contexts[0].currentTime") > spoken > 1

    page.evaluate(RUN, "live")
    expect(views(page)).to_have_count(2)
    second = views(page).nth(1)
    expect(second.locator(".answer")).to_have_text("The morning train leaves at seven.")
    say(second, "The quick brown fox jumps over the lazy dog. " * 4)
    page.wait_for_function("loudness() > 0.05")
    second.get_by_role("button", name="Stop").click()
    page.wait_for_function("loudness() === 0")
    expect(view.get_by_role("status")).to_contain_text("stopped")
    page.evaluate(RUN, "assert live.pipeline.requests == {}")

    say(view, "   ")
    expect(second.get_by_role("alert")).to_have_text("text: expected something to say, got an empty one")
    page.screenshot(path=PICTURES / "live_player.png")

    page.evaluate("jupyterapp.shell.currentWidget.context.save()")
    page.reload()
    expect(views(page)).to_have_count(2)
    say(views(page).first, "Good morning.")
    page.wait_for_function("loudness() > 0.05")
    expect(views(page).nth(1).locator(".answer")).to_have_text("Good morning.")
    assert (diary.errors, diary.outside) == ([], [])
