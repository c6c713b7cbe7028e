"""The players' time arithmetic in JavaScript: known answers, agreement with the figures, modules that load."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from omni_lab.metrics.continuity import underrun_s
from omni_lab.views.request import audio_arrivals, playback
from omni_lab.workbench import module
from tests.workbench.node import node

HERE = Path(__file__).parent
PLAYOUT = module.HERE / "playout.js"
RATE = 24_000

SCHEDULES = """
import { readFileSync } from "node:fs";
const { schedule } = await import(process.argv[1]);
const cases = JSON.parse(readFileSync(0, "utf-8"));
console.log(JSON.stringify(cases.map(([arrivals, samples]) => schedule(arrivals, samples, 24000))));
"""


def schedules(cases: list[tuple[list[float], list[int]]]) -> list[dict]:
    """`schedule` of playout.js for each case of arrival times and samples."""
    return json.loads(node("--input-type=module", "--eval", SCHEDULES, str(PLAYOUT), stdin=json.dumps(cases)))


def some_cases(count: int) -> list[tuple[list[float], list[int]]]:
    """Arrivals early, late and exactly in time, with empty chunks among them."""
    draw = random.Random(7)
    cases = []
    for _ in range(count):
        chunks = draw.randrange(0, 12)
        samples = [draw.choice([0, 1, 1920, 7125, 24_000, draw.randrange(1, 60_000)]) for _ in range(chunks)]
        pace = draw.choice([0.0, 0.5, 1.0, 2.0])
        arrivals, now = [], float(draw.randrange(0, 5000))
        for size in samples:
            arrivals.append(round(now, 3))
            now += pace * 1000 * size / RATE + draw.choice([0.0, 0.0, draw.random() * 300])
        cases.append((arrivals, samples))
    return cases


def test_known_answers():
    assert "# fail 0" in node("--test", "--test-reporter=tap", HERE / "playout_test.mjs")


def test_agrees_with_the_figures():
    cases = some_cases(400)
    silent = 0
    for (arrivals, samples), found in zip(cases, schedules(cases), strict=True):
        times, counts = audio_arrivals(pd.Series({"audio_times_ms": arrivals, "audio_chunk_samples": samples}))
        expected = playback(times, counts / RATE)
        assert found["buffer"]["timesMs"] == pytest.approx(expected.times_ms.tolist(), abs=1e-6)
        assert found["buffer"]["levelS"] == pytest.approx(expected.level_s.tolist(), abs=1e-9)
        spans = np.array([[one["startMs"], one["stopMs"]] for one in found["underruns"]]).reshape(-1, 2)
        assert spans == pytest.approx(expected.underruns_ms, abs=1e-6)
        waited = sum(late["stopMs"] - late["startMs"] for late in found["underruns"]) / 1000
        assert waited == pytest.approx(underrun_s(times / 1000, counts / RATE), abs=1e-9)
        silent += len(spans)
    assert silent > 100


def test_a_long_answer_is_scheduled_chunk_for_chunk():
    chunks = 20_000
    [found] = schedules([([100.0 * i for i in range(chunks)], [2400] * chunks)])
    assert len(found["chunks"]) == chunks
    assert found["durationS"] == pytest.approx(2000)
    assert found["underruns"] == []


def test_the_module_of_the_player_has_each_neighbour_once(tmp_path: Path):
    source = module.esm("player")
    for name in ("playout", "signal", "sound", "dom", "lanes", "panels", "deck", "player"):
        own = module.IMPORT.sub("", (module.HERE / f"{name}.js").read_text("utf-8"))
        assert source.count(own) == 1, name
    assert "import {" not in source
    file = tmp_path / "player.mjs"
    file.write_text(source)
    script = "const m = await import(process.argv[1]); console.log(Object.keys(m.default()).sort().join());"
    assert node("--input-type=module", "--eval", script, str(file)).strip() == "initialize,render"


def test_a_module_that_is_missing_is_named():
    with pytest.raises(FileNotFoundError, match=r"nowhere\.js"):
        module.esm("nowhere")
