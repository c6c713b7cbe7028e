"""Takes out of real runs, the player's traitlets, and the arithmetic of blind tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import traitlets

from omni_lab.frames import Run, load
from omni_lab.run import main
from omni_lab.workbench import AudioPlayer, Take, abx, take_of, takes
from omni_lab.workbench.player import MODES, message

EXPERIMENT = """
name: small
model: {checkpoint: voice}
executor: inline
connector: in_process
optimizations: {graphs: {thinker: false, talker: false, code2wav: false}}
stages: {talker: {sampling: {temperature: 0.0, repetition_penalty: 1.0}}}
workload: {num_prompts: 2, concurrency: [1, 2], warmup: 0, repeats: 1}
results: {save_audio: 2}
sweep:
  rungs:
    - {name: whole, optimizations: {async_chunk: false}}
    - {name: chunks, optimizations: {async_chunk: true}, chunking: {initial_frames: 4, ramp: [4, 8, 16]}}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, voice: Path) -> Run:
    where = tmp_path_factory.mktemp("player")
    (where / "small.yaml").write_text(EXPERIMENT)
    assert main([str(where / "small.yaml"), "--out", str(where / "run")]) == 0
    return load(where / "run")


def tone(seconds: float = 0.5, rate: int = 24_000, level: float = 0.25) -> np.ndarray:
    """Samples that 16 bits hold exactly."""
    wave = level * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)
    return (np.rint(wave * 32768) / 32768).astype(np.float32)


def test_takes_are_the_same_sentence_of_every_cell(run: Run):
    found = takes(run)
    assert [one.label for one in found] == [
        "whole, 1 in flight",
        "whole, 2 in flight",
        "chunks, 1 in flight",
        "chunks, 2 in flight",
    ]
    assert len({one.text for one in found}) == 1
    assert len({one.duration_s for one in found}) == 1
    assert found[0].color == found[1].color != found[2].color
    for one in found:
        assert np.abs(one.samples).max() > 0.05
        assert one.samples == pytest.approx(found[0].samples, abs=2e-4)
        assert len(one.arrivals_ms) == len(one.chunk_samples) == len(one.chunk_frames)
        assert set(one.facts) == {"first audio", "RTF", "underrun"}
    assert [len(one.arrivals_ms) for one in found[:2]] == [1, 1]
    assert found[2].chunk_frames[0] == 4
    assert [sum(found[2].chunk_frames)] == found[0].chunk_frames


def test_takes_by_prompt_configuration_and_concurrency(run: Run):
    prompts = run.requests["prompt"].unique()
    sentence = run.requests.loc[run.requests["prompt"] == prompts[1], "target_text"].iloc[0]
    by_name = takes(run, prompts[1], ["chunks"], 2)
    assert [one.label for one in by_name] == ["chunks"]
    [by_text] = takes(run, sentence, ["chunks"], 2)
    assert np.array_equal(by_text.samples, by_name[0].samples)
    row = run.requests.query("prompt == @prompts[1] and configuration == 'chunks' and concurrency == 2").iloc[0]
    assert np.array_equal(take_of(run, row).samples, by_text.samples)


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ({"prompt": "No such sentence."}, r"prompt 'No such sentence\.': .* only of "),
        ({"configurations": ["full"]}, "configuration 'full': .* only of whole, chunks"),
        ({"concurrency": 64}, "concurrency 64: .* only of 1, 2"),
    ],
)
def test_what_the_run_lacks_is_named(run: Run, wanted: dict, named: str):
    with pytest.raises(ValueError, match=named):
        takes(run, **wanted)


def test_a_run_without_audio_has_no_takes(run: Run):
    run = Run(**{**vars(run), "requests": run.requests.assign(audio_file=None)})
    assert takes(run) == []
    with pytest.raises(ValueError, match="no audio was kept"):
        take_of(run, run.requests.iloc[0])
    assert AudioPlayer(takes(run)).get_state("takes") == {"takes": []}


def test_a_run_of_an_older_version_has_takes_of_its_first_answer(run: Run):
    older = Run(**{**vars(run), "requests": run.requests.drop(columns=["prompt", "target_text"])})
    found = takes(older)
    assert len(found) and len({take.text for take in found}) == 1
    with pytest.raises(ValueError, match="prompt 'any'"):
        takes(older, "any")


def test_a_recording_that_cannot_be_read_is_named(run: Run, tmp_path: Path):
    (tmp_path / "half.flac").write_bytes(b"fLaC")
    damaged = Run(**{**vars(run), "path": tmp_path, "requests": run.requests.assign(audio_file="half.flac")})
    with pytest.raises(ValueError, match=r"half\.flac: expected a readable audio file"):
        takes(damaged)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"samples": np.zeros((2, 8))}, r"samples: expected mono \[n\], found shape \(2, 8\)"),
        ({"chunk_samples": [3, 4]}, "chunk_samples: expected 8 together, found 7"),
        ({"chunk_samples": [4, 4], "arrivals_ms": [1.0]}, "arrivals_ms: expected none or one for each of 2 chunks"),
        ({"chunk_samples": [4, 4], "chunk_frames": [1]}, "chunk_frames: expected none or one for each of 2 chunks"),
        ({"samples": np.full(8, np.nan)}, "samples: expected finite numbers, found NaN"),
        ({"arrivals_ms": [np.inf]}, "arrivals_ms: expected finite numbers, found NaN or infinity"),
        ({"sample_rate": 0}, "sample_rate: expected Hz above 0, found 0"),
    ],
)
def test_a_take_that_does_not_fit_together_is_refused(wrong: dict, named: str):
    with pytest.raises(ValueError, match=named):
        Take(**{"label": "one", "samples": np.zeros(8), "sample_rate": 8000, **wrong})


def test_samples_reach_the_browser_as_they_are():
    exact = message(Take("16 bits", tone(), 24_000), 0)
    assert exact["encoding"] == "int16"
    assert np.array_equal(np.frombuffer(exact["data"], "<i2") / np.float32(32768), tone())
    finer = tone() * np.float32(0.3)
    sent = message(Take("more", finer, 16_000, [5.0, 9.0], [6000, 6000]), 8)
    assert sent["encoding"] == "float32"
    assert np.array_equal(np.frombuffer(sent["data"], "<f4"), finer)
    assert sent["arrivals_ms"] == [5.0, 9.0]
    assert sent["color"] == "#E69F00"
    assert message(Take("arrays", finer, 16_000, np.float64([5, 9]), np.int64([6000, 6000])), 8) == {
        **sent,
        "label": "arrays",
    }
    loud = message(Take("over full scale", np.float32([1.5, -1.0, 1.0]), 24_000), 0)
    assert np.array_equal(np.frombuffer(loud["data"], "<f4"), np.float32([1.5, -1.0, 1.0]))


def test_traits_go_both_ways():
    player = AudioPlayer([Take("a", tone(), 24_000), Take("b", tone(0.3), 16_000)], mode="received", speed=1.5)
    assert (player.a, player.b, player.mode, player.speed) == (0, 1, "received", 1.5)
    state = player.get_state()
    assert [one["sample_rate"] for one in state["takes"]] == [24_000, 16_000]
    player.set_state({"playing": True, "position_s": 0.25, "current": 1, "region": [0.1, 0.2], "chunk": 0})
    assert (player.playing, player.position_s, player.current, player.region) == (True, 0.25, 1, [0.1, 0.2])
    player.takes = [Take("c", tone(0.1), 24_000)]
    assert (player.playing, player.position_s, player.current, player.b) == (False, 0.0, 0, 0)
    assert (player.mode, player.region, player.chunk) == ("speech", [], -1)
    assert player.get_state("takes")["takes"][0]["label"] == "c"


@pytest.mark.parametrize(
    ("trait", "value"),
    [("current", 2), ("a", -1), ("mode", "loud"), ("speed", 3.0), ("region", [0.5, 0.1]), ("region", [0.5])],
)
def test_traits_refuse_what_has_no_meaning(trait: str, value: object):
    player = AudioPlayer([Take("a", tone(), 24_000), Take("b", tone(), 24_000)])
    with pytest.raises(traitlets.TraitError, match=trait):
        setattr(player, trait, value)
    assert player.mode in MODES


def test_trials_are_counted_for_the_pair_that_is_compared():
    player = AudioPlayer([Take(name, tone(), 24_000) for name in "abc"])
    assert player.score == {"correct": 0, "trials": 0, "p_value": 1.0, "verdict": "no trial yet"}
    right = {"a": 0, "b": 1, "x": "b", "answer": "b"}
    player.set_state({"trials": [right] * 9 + [right | {"answer": "a"}]})
    assert (player.score["correct"], player.score["trials"]) == (9, 10)
    assert player.score["p_value"] == pytest.approx(11 / 1024)
    assert player.score["verdict"] == "you hear a difference"
    player.b = 2
    assert player.score["trials"] == 0
    assert len(player.trials) == 10


@pytest.mark.parametrize(
    ("correct", "trials", "expected"),
    [(0, 0, 1.0), (0, 7, 1.0), (5, 10, 638 / 1024), (9, 10, 11 / 1024), (12, 16, 2517 / 65536), (20, 20, 2.0**-20)],
)
def test_p_value_of_guessing(correct: int, trials: int, expected: float):
    assert abx.p_value(correct, trials) == pytest.approx(expected, rel=1e-12)


def test_p_value_refuses_more_right_answers_than_trials():
    with pytest.raises(ValueError, match="expected 0 to 3"):
        abx.p_value(4, 3)


@pytest.mark.parametrize(
    ("correct", "trials", "words"),
    [(4, 4, "too few trials to tell"), (5, 5, "you hear a difference"), (6, 12, "no difference shown")],
)
def test_the_verdict_claims_no_more_than_the_trials_show(correct: int, trials: int, words: str):
    assert abx.Score(correct, trials).verdict == words
