"""The live player through a real pipeline: what it says, what it keeps, how it stops, and what it tells of mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from omni_lab.core import PipelineError, RequestError
from omni_lab.experiment import ExperimentError
from omni_lab.metrics.definitions import SAMPLE_RATE
from omni_lab.metrics.records import RequestRow
from omni_lab.metrics.request import request_figures
from omni_lab.workbench import module
from omni_lab.workbench.live import LivePlayer, read_experiment, voices
from omni_lab.workbench.player import AudioPlayer
from omni_lab.workload.dataset import Prompt, reading
from omni_lab.workload.requests import make_request
from tests.pipelines import answers
from tests.workbench.node import node

FULL = Path(__file__).parents[2] / "experiments" / "full.yaml"
LONG = "The quick brown fox jumps over the lazy dog. " * 4


def until(true, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def live():
    player = LivePlayer(FULL)
    until(lambda: player.state == "ready")
    yield player
    player.close()


def test_what_is_said_is_the_pipelines_answer(live: LivePlayer):
    live.say("Good morning.")
    take = live.take
    experiment = read_experiment(FULL, ())
    request = make_request(experiment, Prompt("", reading(experiment.workload, "Good morning."), ""), 0, "live")
    [[expected]], _ = answers(experiment, [request])
    assert np.array_equal(take.samples, expected.wave)
    assert (take.text, take.label, take.sample_rate) == (expected.text, "full", SAMPLE_RATE)
    assert take.chunk_samples == [len(chunk.samples) for chunk in expected.chunks]
    assert take.chunk_frames == [chunk.frames for chunk in expected.chunks]
    assert take.arrivals_ms == sorted(take.arrivals_ms)
    assert list(take.facts) == ["first audio", "RTF", "underrun"]
    assert AudioPlayer([take]).takes == [take]


def test_the_widget_shows_what_has_arrived(live: LivePlayer):
    live.say("Yes.")
    assert live.take.text == "Yes."  # now there is a record to be taken away
    shown = []
    live.observe(lambda change: shown.append(change["new"]), "record")
    live.say("Good morning.")
    take = live.take
    live.unobserve_all("record")
    assert shown[0] is None
    sizes = [len(record["text_times_ms"]) + len(record["audio_times_ms"]) for record in shown[1:]]
    assert sizes == sorted(sizes) and len(set(sizes)) > 2, "it grew while events came"
    assert [record["e2el_ms"] is None for record in shown[1:]] == [True] * (len(shown) - 2) + [False]
    assert live.record["audio_times_ms"] == take.arrivals_ms
    assert live.record["audio_chunk_samples"] == take.chunk_samples
    assert (live.state, live.status, live.error, live.prompt) == ("ready", "ready", "", "Good morning.")
    assert live.answer == take.text != ""


def test_stop_frees_the_slot_at_once_and_keeps_what_came(live: LivePlayer):
    live.say(LONG)
    until(lambda: live.record and live.record["audio_times_ms"])
    assert live.state == "speaking" and len(live.pipeline.requests) == 1
    live.stop()
    assert live.pipeline.requests == {}
    until(lambda: not any(worker.sequences for worker in live.pipeline.executor.workers))
    assert (live.state, live.status, live.record["e2el_ms"]) == ("ready", "stopped", None)
    assert 0 < len(live.take.samples) == sum(live.record["audio_chunk_samples"])


def test_saying_something_else_stops_the_answer_before(live: LivePlayer):
    live.say(LONG)
    until(lambda: live.state == "speaking")
    live.say("Good morning.")
    assert live.take.text == live.answer
    assert live.pipeline.requests == {}
    assert live.record["e2el_ms"] > 0


@pytest.mark.parametrize(
    ("text", "speaker", "told"),
    [
        ("  ", None, "text: expected something to say, got an empty one"),
        ("word " * 5000, None, "limit"),
        ("Good morning.", "nobody", "speaker: unknown speaker 'nobody'"),
    ],
)
def test_a_text_that_cannot_be_said_is_told_in_one_sentence(live: LivePlayer, text: str, speaker: str, told: str):
    live.say(text, speaker)
    with pytest.raises(RequestError, match=told):
        _ = live.take
    assert told in live.error and "\n" not in live.error and live.state == "ready"
    live.say("Good morning.")
    assert len(live.take.samples) and live.error == ""


@pytest.mark.parametrize(
    ("given", "settings", "error", "told"),
    [
        (FULL, ["model.checkpoint=voise"], ExperimentError, "did you mean 'voice'?"),
        (FULL, ["optimizations.ramp=1", "executor=inlin"], ExperimentError, "unknown key"),
        ("none.yaml", [], ExperimentError, "none.yaml"),
        (FULL, ["model.checkpoint={broken}"], PipelineError, "config.json"),
    ],
)
def test_what_cannot_open_is_told_in_one_sentence(given, settings, error, told, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    player = LivePlayer(given, [setting.replace("{broken}", str(tmp_path)) for setting in settings])
    try:
        until(lambda: player.state == "failed")
        assert told in player.error and "\n" not in player.error
        player.say("Good morning.")
        with pytest.raises(error):
            _ = player.take
    finally:
        player.close()


def test_an_experiment_is_taken_as_it_is():
    experiment = read_experiment(FULL, ["executor=process"])
    assert (experiment.executor, any(experiment.optimizations.graphs.values())) == ("process", False)
    assert read_experiment(experiment, ()) is experiment
    with pytest.raises(ExperimentError, match="settings"):
        read_experiment(experiment, ["executor=inline"])


def test_only_different_voices_are_offered(live: LivePlayer):
    assert len(live.speakers) == 1
    assert voices({"one": 1, "two": 2, "uno": 1}) == ["one", "two"]
    several = LivePlayer(FULL, ["model.checkpoint=nano"])
    until(lambda: several.state == "ready")
    assert len(several.speakers) == len(set(several.pipeline.front_end.speakers.values())) > 1
    several.close()


def test_closing_ends_everything_and_is_final():
    player = LivePlayer(FULL)
    with pytest.raises(ValueError, match="nothing has been said"):
        _ = player.take
    player.say(LONG)
    until(lambda: player.state == "speaking")
    pipeline = player.pipeline
    player.close()
    assert pipeline.requests == {} and pipeline.closing and player.state == "closed"
    player.close()
    with pytest.raises(RuntimeError, match="closed"):
        player.say("Good morning.")


def test_stopped_while_it_loads():
    player = LivePlayer(FULL)
    player.say("Good morning.")
    player.stop()
    with pytest.raises(ValueError, match="nothing was spoken"):
        _ = player.take
    player.close()


def test_a_process_ends_cleanly_in_the_middle_of_an_answer():
    script = f"""
        import time
        from omni_lab.workbench.live import LivePlayer

        player = LivePlayer({str(FULL)!r})
        player.say({LONG!r})
        while not (player.record and player.record["audio_times_ms"]):
            time.sleep(0.01)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


FIGURES = """
import { readFileSync } from "node:fs";
const { figuresOf } = await import(process.argv[1]);
console.log(JSON.stringify(JSON.parse(readFileSync(0, "utf-8")).map(figuresOf)));
"""


def test_the_pages_figures_are_the_librarys():
    rows = [
        RequestRow("none", 0, 0, end_ns=5_000_000),
        RequestRow("text", 0, 0, end_ns=9_000_000, text_ns=[3_000_000, 8_000_000], text_tokens=[1, 2]),
        *(
            RequestRow(
                "speech", 0, 0, 1_000_000, 900_000_000, text_ns=[2_000_000], text_tokens=[1], audio_ns=times,
                audio_samples=samples, audio_frames=[1] * len(samples),
            )
            for times, samples in [
                ([50_000_000, 130_000_000, 880_000_000], [1365, 1920, 0]),
                ([50_000_000, 300_000_000, 880_000_000], [1365, 24_000, 1920]),
                ([50_000_000, 51_000_000, 880_000_000], [0, 1920, 1920]),
            ]
        ),
    ]  # fmt: skip
    since = [[(at - row.sent_ns) / 1e6 for at in times] for row in rows for times in (row.text_ns, row.audio_ns)]
    asked = [
        {"text_times_ms": since[2 * i], "audio_times_ms": since[2 * i + 1], "audio_chunk_samples": row.audio_samples}
        | {"sample_rate": SAMPLE_RATE, "e2el_ms": (row.end_ns - row.sent_ns) / 1e6}
        for i, row in enumerate(rows)
    ]
    arguments = ("--input-type=module", "--eval", FIGURES, module.HERE / "arrivals.js")
    for row, found in zip(rows, json.loads(node(*arguments, stdin=json.dumps(asked))), strict=True):
        expected = request_figures(row, SAMPLE_RATE)
        for name, value in found.items():
            assert value == pytest.approx(getattr(expected, name), abs=1e-6), (row.id, name)
