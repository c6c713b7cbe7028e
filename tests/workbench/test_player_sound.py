"""What leaves the loudspeaker, sample by sample: the player's own module, rendered in a browser without a clock."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator

import numpy as np
import pytest
from playwright.sync_api import Page, sync_playwright

from omni_lab.workbench.module import esm

RATE = 24_000
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

RENDER = """
async ({ samples, take, from, manner, switchAt, seconds }) => {
  const context = new OfflineAudioContext(1, Math.round(seconds * 24000), 24000);
  Object.defineProperty(context, "state", { value: "running" });
  window.AudioContext = function () { return context; };
  const data = new DataView(Uint8Array.from(atob(samples), (letter) => letter.charCodeAt(0)).buffer);
  const { arrivals_ms: arrivals, chunk_samples: chunks, speed } = take;
  const buffer = audioBuffer({ encoding: "float32", sample_rate: 24000, data });
  const segments = schedule(arrivals, chunks, 24000).segments;
  const track = { buffer: stretched(buffer, speed), segments, gain: 1, stretched: speed };
  const sound = new Sound();
  await sound.start(track, from, manner);
  for (const at of switchAt) context.suspend(at).then(() => {
    sound.change({ ...track }, manner);
    context.resume();
  });
  const heard = new Uint8Array((await context.startRendering()).getChannelData(0).buffer);
  let letters = "";
  for (const byte of heard) letters += String.fromCharCode(byte);
  sound.stop();
  return btoa(letters);
}
"""

STRETCHED = """
const stretched = (buffer, speed) => {
  const made = stretch(buffer.getChannelData(0), 24000, speed);
  const slowed = new AudioBuffer({ length: made.length, numberOfChannels: 1, sampleRate: 24000 });
  slowed.copyToChannel(made, 0);
  return slowed;
};
Object.assign(window, { Sound, audioBuffer, schedule, stretched });
"""

SPEECH = (0.4 * np.sin(np.arange(RATE) / 17.0) * np.hanning(RATE)).astype(np.float32)
"""One second, soft at both ends."""

FADE = round(0.01 * RATE)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """An empty page with the player's modules. Skips where there is no browser."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip(f"no browser on PATH: none of {', '.join(PROGRAMS)} (Debian: apt install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page()
        page.add_script_tag(content=esm("deck") + STRETCHED, type="module")
        page.wait_for_function("'Sound' in window")
        yield page
        browser.close()


def heard(
    page: Page, take: dict, seconds: float, span: list[float], switch_at: tuple[float, ...] = (), **how
) -> np.ndarray:
    """What is heard of SPEECH within `seconds`, the track changed for an equal one at each of `switch_at`."""
    manner = {"span": span, "speed": how.get("speed", 1), "loop": how.get("loop", False)}
    rendered = page.evaluate(
        RENDER,
        {
            "samples": base64.b64encode(SPEECH.tobytes()).decode(),
            "take": {"arrivals_ms": [], "chunk_samples": [RATE], "speed": 1, **take},
            "from": how.get("start", span[0]),
            "manner": manner,
            "switchAt": list(switch_at),
            "seconds": seconds,
        },
    )
    return np.frombuffer(base64.b64decode(rendered), np.float32)


def test_plain_speech_is_heard_as_it_is(page: Page):
    found = heard(page, {}, 1.5, [0, 1])
    assert found[FADE:RATE] == pytest.approx(SPEECH[FADE:], abs=1e-5)
    assert not found[RATE:].any()


def test_as_received_with_its_wait_and_its_gap(page: Page):
    """A quarter of a second after half a second, the rest a tenth of a second late."""
    take = {"arrivals_ms": [500, 850], "chunk_samples": [RATE // 4, 3 * RATE // 4]}
    found = heard(page, take, 2, [0, 1.6])
    gap, end = round(0.75 * RATE), round(0.85 * RATE)
    assert not found[: RATE // 2].any()
    assert found[RATE // 2 : gap - 1] == pytest.approx(SPEECH[: RATE // 4 - 1], abs=1e-5)
    assert not found[gap + 1 : end - 1].any()
    assert found[end : end + 3 * RATE // 4 - 1] == pytest.approx(SPEECH[RATE // 4 : -1], abs=1e-5)


def test_a_change_between_equal_takes_cannot_be_heard(page: Page):
    plain = heard(page, {}, 1.2, [0, 1])
    found = heard(page, {}, 1.2, [0, 1], switch_at=(0.2, 0.21, 0.4, 0.55))
    assert found == pytest.approx(plain, abs=1e-4)


def test_a_loop_repeats_the_region_without_a_gap(page: Page):
    found = heard(page, {}, 1.0, [0.3, 0.5], start=0.4, loop=True)
    region = SPEECH[round(0.3 * RATE) : round(0.5 * RATE)]
    expected = np.concatenate([region[len(region) // 2 :], *[region] * 5])[: len(found)]
    assert found[FADE:] == pytest.approx(expected[FADE:], abs=1e-3)


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_another_speed_takes_its_time_at_the_same_pitch(page: Page, speed: float):
    found = heard(page, {"speed": speed}, 2.5, [0, 1], speed=speed)
    last, heard_last = (np.flatnonzero(np.abs(one) > 1e-3)[-1] for one in (SPEECH, found))
    assert heard_last / RATE == pytest.approx(last / RATE / speed, abs=0.05)
    crossings = np.flatnonzero((found[:-1] < 0) & (found[1:] >= 0))
    assert np.median(np.diff(crossings)) == pytest.approx(2 * np.pi * 17, abs=2)
