"""Three notebooks as readers meet them: all cells run, widgets come up, audio advances, sliders change figures."""

from __future__ import annotations

from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import PICTURES, Diary

KERNEL_READY = "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"

RAN = """() => {
  const cells = [...jupyterapp.shell.currentWidget.content.model.cells].filter((cell) => cell.type === "code");
  const outputs = cells.flatMap((cell) => cell.outputs.toJSON());
  const errors = outputs.filter((output) => output.output_type === "error").map((output) => output.evalue);
  return errors.length || cells.every((cell) => cell.executionCount !== null) ? { errors } : null;
}"""
"""The errors of the notebook's cells, once all have run or one has failed."""

SHOWN = "(plot) => JSON.stringify([plot.data, plot.layout])"
"""What a plotly figure shows."""


def test_the_quickstart_is_heard(page: Page, diary: Diary):
    open_and_run(page, "00_quickstart")
    play(page.get_by_role("region", name="Audio player").first)
    live = page.get_by_role("region", name="Live player")
    live.scroll_into_view_if_needed()
    expect(live.get_by_role("status")).to_have_text("ready")
    settle(page, "00_quickstart", diary)


def test_a_slider_shows_the_steps_at_another_load(page: Page, diary: Diary):
    open_and_run(page, "04_async_output")
    move(page.get_by_role("slider").first)
    settle(page, "04_async_output", diary)


def test_an_answer_is_heard_and_cut_anew(page: Page, diary: Diary):
    open_and_run(page, "09_playback")
    play(page.get_by_role("region", name="Audio player").first)
    move(page.locator(".widget-slider").filter(has_text="first").get_by_role("slider"))
    settle(page, "09_playback", diary)


def open_and_run(page: Page, notebook: str) -> None:
    """Opens a notebook and runs all its cells from the menu; none may fail."""
    page.goto(f"lab/tree/{notebook}.ipynb?reset")
    page.wait_for_function(KERNEL_READY)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
    assert page.wait_for_function(RAN).json_value()["errors"] == []


def play(player: Locator) -> None:
    """Clicks play and waits until the audio has advanced by half a second."""
    player.scroll_into_view_if_needed()
    player.get_by_role("button", name="Play").click()
    position = player.get_by_role("slider", name="Position in the speech").element_handle()
    player.page.wait_for_function("(slider) => Number(slider.ariaValueNow) > 0.5", arg=position)


def move(slider: Locator) -> None:
    """Moves a slider by a key, and waits until the figure beneath it shows something else."""
    slider.scroll_into_view_if_needed()
    figure = slider.locator("xpath=ancestor::*[.//*[contains(@class, 'js-plotly-plot')]][1]")
    plot = figure.locator(".js-plotly-plot").first.element_handle()
    before = plot.evaluate(SHOWN)
    lowest = slider.get_attribute("aria-valuenow") == slider.get_attribute("aria-valuemin")
    slider.press("ArrowRight" if lowest else "ArrowLeft")
    slider.page.wait_for_function(f"([plot, before]) => ({SHOWN})(plot) !== before", arg=[plot, before])


def settle(page: Page, name: str, diary: Diary) -> None:
    """Keeps a picture of the page, on which nothing may have gone wrong or been asked of other machines."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png")
    assert diary.errors == []
    assert diary.outside == []
