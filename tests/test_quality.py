"""What a run sounds like: on signals whose answer is known, and on real speech from real pipelines."""

from __future__ import annotations

import builtins
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import soundfile

from omni_lab import load, quality
from omni_lab.quality import loudness as bs1770
from omni_lab.quality.__main__ import as_text, main
from omni_lab.quality.clicks import clicks
from omni_lab.quality.silence import silence
from omni_lab.quality.summary import FIRST, IDENTICAL, ROUNDING
from omni_lab.quality.table import current
from omni_lab.quality.words import SEED_TTS, SPELLED, WHISPER, Definition, count
from omni_lab.run import main as run_experiment
from omni_lab.views import quality as views
from omni_lab.views.report import write_report

RATE = 24_000
CHUNKED = Path(__file__).parent.parent / "experiments" / "async_output.yaml"
PROMPTS = 3


def tone(seconds: float, dbfs: float, hertz: float = 997.0, rate: int = RATE) -> np.ndarray:
    time = np.arange(round(seconds * rate)) / rate
    return (10 ** (dbfs / 20) * np.sin(2 * np.pi * hertz * time)).astype(np.float32)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The voice says three sentences whole and in chunks."""
    path = tmp_path_factory.mktemp("quality")
    experiment = {
        "name": "heard",
        "extends": str(CHUNKED),
        "executor": "inline",
        "model": {"checkpoint": "voice"},
        "chunking": {"initial_frames": 2, "frames": 5, "left_context": 25},
        "optimizations": {"graphs": {"thinker": False, "talker": False, "code2wav": False}},
        "workload": {"num_prompts": PROMPTS, "concurrency": PROMPTS, "repeats": 1, "warmup": 0, "seed": 4},
        "sweep": {"rungs": [{"name": "whole", "optimizations": {"async_chunk": False}}, {"name": "chunked"}]},
    }
    (path / "heard.yaml").write_text(json.dumps(experiment), "utf-8")
    assert run_experiment([str(path / "heard.yaml"), "--out", str(path / "run"), "--quiet"]) == 0
    return path / "run"


@pytest.fixture(scope="module")
def heard(run_dir: Path) -> pd.DataFrame:
    return quality.hear(run_dir, bar=False)


@pytest.fixture
def spoiled(run_dir: Path, tmp_path: Path) -> Callable[[Callable[[np.ndarray, pd.Series], np.ndarray]], Path]:
    """Copies the run, with every recording of `chunked` changed by a function of samples and request."""

    def spoil(change: Callable[[np.ndarray, pd.Series], np.ndarray]) -> Path:
        copy = Path(shutil.copytree(run_dir, tmp_path / "run"))
        requests = load(copy).requests
        for _, row in requests[requests["configuration"] == "chunked"].iterrows():
            samples, rate = soundfile.read(copy / row["audio_file"], dtype="float32")
            soundfile.write(copy / row["audio_file"], change(samples, row), rate, subtype="PCM_16")
        return copy

    return spoil


@pytest.mark.parametrize("rate", [16_000, 24_000, 44_100, 48_000])
@pytest.mark.parametrize("dbfs", [-20.0, -36.0])
def test_the_recommendations_tone_has_its_loudness(rate: int, dbfs: float):
    """BS.1770: a full-scale sine of 997 Hz in one channel reads -3.01 LUFS."""
    assert bs1770.loudness(tone(5, dbfs, rate=rate), rate) == pytest.approx(dbfs - 3.01, abs=0.02)


def test_quiet_passages_do_not_count():
    """EBU Tech 3341, cases 3 and 4, in one channel: -3 LU beside its two."""
    loud, quiet, hushed = tone(20, -23), tone(4, -36), tone(4, -72)
    gated = bs1770.loudness(np.concatenate([hushed, quiet, loud, quiet, hushed]), RATE)
    assert gated == pytest.approx(-26.01, abs=0.1)


@pytest.mark.parametrize(("hertz", "gain"), [(20, -13.3), (38.135, -6.0), (100, -1.15), (997, 0.691), (10_000, 4.0)])
def test_weighting_passes_and_lifts(hertz: float, gain: float):
    """The high-pass has Q 1/2, so x = f / 38.135 Hz leaves x² / (1 + x²); the shelf lifts high frequencies by 4 dB."""
    level = bs1770.loudness(tone(5, -20, hertz), RATE)
    assert level + 0.691 + 23.01 == pytest.approx(gain, abs=0.1)


def test_no_loudness_without_sound():
    assert math.isnan(bs1770.loudness(np.zeros(RATE, np.float32), RATE))
    assert math.isnan(bs1770.loudness(tone(0.3, -20), RATE))
    assert math.isnan(bs1770.true_peak(np.zeros(RATE, np.float32), RATE))


def test_peaks_between_samples_and_samples_at_full_scale():
    """A quarter of the rate, sampled beside its peaks, has samples 3 dB below them (BS.1770, annex 2)."""
    time = np.arange(RATE)
    wave = np.sin(np.pi / 2 * time + np.pi / 4) * np.hanning(RATE)
    assert 20 * np.log10(np.abs(wave).max()) == pytest.approx(-3.01, abs=0.01)
    assert bs1770.true_peak(wave, RATE) == pytest.approx(0, abs=0.1)
    assert bs1770.clipped(tone(1, -0.1)) == 0
    assert bs1770.clipped(np.clip(tone(1, 6), -1, 1)) > RATE / 3


def test_silence_is_measured():
    parts = [np.zeros(RATE // 2), tone(0.4, -20), np.zeros(RATE // 5), tone(0.3, -20), 1e-3 * tone(0.25, 0)]
    found = silence(np.concatenate(parts).astype(np.float32), RATE)
    assert (found.leading, found.longest, found.trailing) == pytest.approx((0.5, 0.2, 0.25), abs=0.011)
    assert silence(np.zeros(RATE, np.float32), RATE).leading == 1.0
    assert silence(np.zeros(0, np.float32), RATE).leading == 0.0


def test_an_inserted_click_is_found_and_a_smooth_edge_is_a_place_like_any_other():
    random = np.random.default_rng(0)
    noise = 0.05 * np.convolve(random.standard_normal(3 * RATE), np.hanning(24), "same").astype(np.float32)
    edges = [9000, 30_000, 51_000]
    smooth = clicks(noise, RATE, edges)
    assert (smooth.edges, smooth.clicks) == (3, 0)
    assert 5 < smooth.percentile < 95
    many = clicks(noise, RATE, random.integers(3000, 69_000, 12).tolist())
    assert many.percentile == pytest.approx(50, abs=30)

    broken = noise.copy()
    broken[30_000:51_000] += 0.5
    found = clicks(broken, RATE, edges)
    assert found.clicks == 2
    assert found.percentile > smooth.percentile
    assert found.worst_db > smooth.worst_db + 6


def test_clicks_need_edges():
    found = clicks(tone(1, -20), RATE, [])
    assert (found.edges, found.clicks) == (0, 0)
    assert math.isnan(found.percentile)
    assert clicks(np.zeros(RATE, np.float32), RATE, [RATE // 2]).clicks == 0


@pytest.mark.parametrize(
    ("definition", "reference", "said", "errors", "words"),
    [
        (WHISPER, "Mr. Smith won't pay $20!", "mister smith will not pay twenty dollars", 0, 6),
        (WHISPER, "The colour is grey.", "the color is gray", 0, 4),
        (WHISPER, "red green blue", "green blue black white", 3, 3),
        (WHISPER, "Gate B 7 2.", "Gate B72", 2, 4),
        (SPELLED, "Gate B 7 2.", "Gate B72", 0, 2),
        (SPELLED, "At 7.30 sharp.", "At 730 sharp", 0, 3),
        (SPELLED, "Twelve and a half frames.", "12. And a half frames", 0, 2),
        (SPELLED, "Twelve and a half frames.", "125 frames", 1, 2),
        (SPELLED, "One and a half hours.", "1 and a half hours", 0, 2),
        (SPELLED, "Two and a half million.", "2 and a half million", 0, 1),
        (SEED_TTS, "Don't, please: wait!", "don't please wait", 0, 3),
        (SEED_TTS, "The colour is grey.", "the color is gray", 2, 4),
        (SEED_TTS, "“Stop” — now…", "stop now", 0, 2),
        (SEED_TTS, "Twenty dollars.", "$20", 2, 2),
        (WHISPER, "?", "hello there", 2, 0),
        (WHISPER, "Good morning.", "", 2, 2),
    ],
)
def test_errors_by_each_definition(definition: Definition, reference: str, said: str, errors: int, words: int):
    found = count(definition, reference, said)
    assert (found.errors, found.words) == (errors, words)


def test_characters_and_how_sentences_become_one_rate():
    found = count(SEED_TTS, "abcd", "abxd")
    assert (found.character_errors, found.characters) == (1, 4)
    errors, words = np.array([1.0, 1.0]), np.array([2.0, 8.0])
    assert WHISPER.rate(errors, words) == pytest.approx(2 / 10)
    assert SEED_TTS.rate(errors, words) == pytest.approx((1 / 2 + 1 / 8) / 2)
    assert WHISPER.rate(errors, words, np.array([[2, 0], [0, 2]])).tolist() == [0.5, 0.125]


def test_real_speech_is_understood(heard: pd.DataFrame):
    assert len(heard) == 2 * PROMPTS
    assert heard["errors"].sum() <= 0.1 * heard["words"].sum()
    assert heard["loudness_lufs"].between(-40, -10).all()
    assert heard["words_per_s"].between(1, 6).all()
    assert (heard["peak_dbtp"] < 0).all() and not heard["clipped_samples"].any()
    whole, chunked = (rows for _, rows in heard.groupby("configuration", observed=True))
    assert not whole["edges"].any() and chunked["edges"].any()
    assert not chunked["clicks"].any()
    assert chunked["edge_percentile"].mean() == pytest.approx(50, abs=25)


def test_chunks_change_neither_samples_nor_words(heard: pd.DataFrame):
    whole, chunked = quality.by_configuration(heard).to_dict("records")
    assert (whole["configuration"], whole["samples"], whole["wer_verdict"]) == ("whole", FIRST, FIRST)
    assert chunked["samples"] in (IDENTICAL, ROUNDING)
    assert chunked["compared"] == PROMPTS
    assert chunked["wer_verdict"] == "within noise"
    assert chunked["edge_percentile"] == pytest.approx(chunked["compared_edge_percentile"], abs=1)
    assert chunked["wer_low_percent"] <= chunked["wer_percent"] <= chunked["wer_high_percent"]


def test_spoiled_speech_is_seen(spoiled: Callable):
    found = quality.hear(spoiled(lambda wave, _: wave[::-1]), bar=False)
    whole, chunked = quality.by_configuration(found).to_dict("records")
    assert chunked["samples"] == "different"
    assert chunked["wer_verdict"] == "higher"
    assert chunked["wer_percent"] > whole["wer_percent"]
    assert chunked["worst_percent"] >= 80


def test_jumps_at_the_edges_are_seen(spoiled: Callable):
    def jump(wave: np.ndarray, row: pd.Series) -> np.ndarray:
        signs = np.repeat((-1.0) ** np.arange(len(row["audio_chunk_samples"])), row["audio_chunk_samples"])
        return 0.9 * wave + 0.09 * signs

    chunked = quality.by_configuration(quality.measure(spoiled(jump))).iloc[1]
    assert chunked["clicks"] > 0.4 * chunked["edges"] > 0
    assert chunked["edge_percentile"] > chunked["compared_edge_percentile"] + 20
    assert np.isnan(chunked["wer_percent"])


def test_a_missing_end_is_seen(spoiled: Callable):
    found = quality.measure(spoiled(lambda wave, _: wave[:-1000]))
    chunked = found[found["configuration"] == "chunked"]
    assert (chunked["length_difference"] == -1000).all()
    assert quality.by_configuration(found)["samples"].tolist() == [FIRST, "different"]


def test_the_command_keeps_what_it_heard_and_the_report_shows_it(spoiled: Callable, capsys: pytest.CaptureFixture):
    copy = spoiled(lambda wave, _: wave)
    write_report(copy)
    assert "Word error rate: not measured" in (copy / "report.html").read_text("utf-8")
    assert main([str(copy), "--definition", "seed-tts", "--report", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "Seed-TTS-eval" in told["word_error_rate"]
    assert "Seed-TTS-eval" in (copy / "report.html").read_text("utf-8")

    run = load(copy)
    assert run.quality["configuration"].dtype == run.requests["configuration"].dtype
    assert current(run).equals(run.quality)
    kept = quality.by_configuration(run.quality)
    text = as_text(run.quality, SEED_TTS.says)
    assert all(word in text for word in ("whole", "chunked", "within noise", SEED_TTS.says))
    assert [row["wer_percent"] for row in told["configurations"]] == pytest.approx(kept["wer_percent"].tolist())
    assert len(told["requests"]) == 2 * PROMPTS
    for figure in (views.word_errors(run.quality), views.loudness(run.quality), views.clicks(run.quality)):
        assert any(len(trace.y) for trace in figure.data)

    lines = (copy / "requests.jsonl").read_text("utf-8").splitlines()
    (copy / "requests.jsonl").write_text("\n".join(lines[:-1]), "utf-8")
    assert current(load(copy))["heard"].isna().all(), "what was heard of other recordings does not count"


def test_what_cannot_be_heard_is_said(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    with pytest.raises(SystemExit):
        main([str(run_dir), "--no-words", "--report"])
    assert main([str(tmp_path)]) == 2
    assert "run.json: no such file" in capsys.readouterr().err
    with pytest.raises(ValueError, match="expected one of whisper, spelled, seed-tts, got 'wer'"):
        quality.hear(run_dir, "wer")
    silent = Path(shutil.copytree(run_dir, tmp_path / "silent"))
    rows = [json.loads(line) for line in (silent / "requests.jsonl").read_text("utf-8").splitlines()]
    (silent / "audio" / Path(rows[0]["audio_file"]).name).unlink()
    assert main([str(silent), "--no-words"]) == 2
    assert rows[0]["audio_file"] in capsys.readouterr().err
    lines = [json.dumps(row | {"audio_file": None}) for row in rows]
    (silent / "requests.jsonl").write_text("\n".join(lines), "utf-8")
    assert main([str(silent), "--no-words"]) == 2
    assert "kept no audio" in capsys.readouterr().err
    assert views.section(load(silent)) is None

    real = builtins.__import__

    def without(name: str, *arguments: object) -> object:
        if name == "faster_whisper":
            raise ModuleNotFoundError("No module named 'faster_whisper'")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main([str(run_dir)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'omni-lab[quality]'" in line and "--no-words" in line
    assert main([str(run_dir), "--no-words"]) == 0
